"""Numbers of GPUs, engines, batches and steps, computed from several settings of the other program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.migrate.convert import sequences
from skyrl_mega.config.migrate.state import TranslationState

PROCESSES = 8
"""Assumed number of TRL's processes if the launcher's option is not given: a node of 8 GPUs."""
START_SECONDS = 1800
"""Time limit for the start on several nodes, as in `configs/cluster/`."""
STEPS_DECIDE = {"slime": ("--num-rollout", "--num-epoch"), "TRL": ("max_steps", "num_train_epochs")}
"""Program → (key of the number of steps, key of the number of epochs). Given steps make the epochs ineffective."""
ENGINES = "policy.generation.colocated.resources"
"""NeMo-RL's group for the GPUs of engines that share none with the policy."""
ENDLESS = 1_000_000
"""Number of epochs out of reach of every run, so `run.steps` ends the run."""


def batches(t: TranslationState) -> None:
    """Translates TRL's batch sizes, number of processes and steps into our settings, in the translation `t`. Does
    nothing for other programs.

    A figure that is not given counts as TRL's default. An unknown number of processes counts as 8, with an assumption
    for the user. If only running the script would give a figure, the settings that depend on the figure keep our
    defaults, and its row of the account is `dropped`.
    """
    if t.program != "TRL":
        return
    processes = _processes(t)
    unknown = _Unknown(t)
    samples: int | None = t.ours("data.samples_per_prompt")
    if "num_generations" in t.given and "data.samples_per_prompt" not in t.migration.settings:
        unknown.add("num_generations")
        samples = None
    per_device = _number(t, "per_device_train_batch_size", 8, unknown)
    accumulation = _number(t, "gradient_accumulation_steps", 1, unknown)
    iterations = _number(t, "num_iterations", 1, unknown)
    per_generation = _number(t, "steps_per_generation", accumulation, unknown)
    optimizer_batch = _product(per_device, processes, accumulation)
    generation = _number(t, "generation_batch_size", _product(per_device, processes, per_generation), unknown)
    sizes: dict[str, Any] = {}
    why = []
    prompts = mini = None
    if generation and samples:
        prompts = sizes["data.prompts_per_step"] = max(1, generation // samples)
        why.append(f"{generation} completions of a generation / {samples}")
    if generation and samples and optimizer_batch:
        mini = sizes["data.mini_batch_prompts"] = max(1, min(optimizer_batch, generation) // samples)
        why.append(f"{optimizer_batch} of an optimizer step / {samples}")
    text = ", ".join(why)
    for key in ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps"):
        if key not in unknown.keys:
            kind, reason = ("changed", text) if sizes else ("dropped", unknown.text("the batch of an RL step"))
            t.consume(key, kind, sizes, reason)
    t.migration.add("TRL's batch", sizes, text)
    if per_device:
        tokens = sequences(per_device, ["policy.micro_tokens"], None, t)
        reason = "; ".join(filter(None, (text, tokens[1])))
        t.consume("per_device_train_batch_size", "changed", {**sizes, **tokens[0]}, reason)
        t.migration.add("TRL's default per_device_train_batch_size=8", tokens[0], tokens[1])
    if iterations:
        t.consume("num_iterations", "taken", {"data.epochs_per_step": iterations})
    unknown.assume(sizes)
    _steps(t, math.ceil(prompts / mini) * iterations if prompts and mini and iterations else None, unknown)


class _Unknown:
    """Figures of TRL that only a running program knows, or that are no numbers."""

    def __init__(self, t: TranslationState) -> None:
        """Starts without any unknown figure."""
        self.t = t
        self.keys: list[str] = []

    def add(self, key: str) -> None:
        """Adds a figure."""
        self.keys.append(key)

    def text(self, what: str) -> str:
        """Returns why something else cannot be computed."""
        return f"{what} also depends on {' and '.join(self.keys)}, which is unknown here"

    def assume(self, sizes: Mapping[str, Any]) -> None:
        """Says which sizes are left out."""
        left = [key for key in ("data.prompts_per_step", "data.mini_batch_prompts") if key not in sizes]
        if "per_device_train_batch_size" in self.keys:
            left.append("policy.micro_tokens")
        if self.keys and left:
            self.t.migration.assumptions.append(
                f"{' and '.join(self.keys)} of TRL: no number is known here, so {' and '.join(left)} "
                f"{'keep their defaults' if len(left) > 1 else 'keeps its default'}; give them in the file"
            )


def _processes(t: TranslationState) -> int:
    """Returns the number of processes, and sets nodes and GPUs for them."""
    given = t.given["num_processes"].value if "num_processes" in t.given else t.reading.processes
    processes = _whole(given) or PROCESSES
    if not _whole(given):
        problem = "is not given" if given is None else f"is unknown ({shown(given)})"
        t.migration.assumptions.append(
            f"the number of processes {problem}: {PROCESSES} GPUs are assumed (add --num_processes N)"
        )
    gpus = min(processes, 8)
    ours = {"cluster.gpus_per_node": gpus, "cluster.nodes": math.ceil(processes / gpus)}
    t.consume("num_processes", "changed", ours)
    t.migration.add(f"{processes} processes", ours)
    return processes


def _steps(t: TranslationState, optimizer_steps: int | None, unknown: _Unknown) -> None:
    """Translates TRL's intervals in optimizer steps to RL steps."""
    for key, ours in (
        ("max_steps", "run.steps"),
        ("save_steps", "checkpoint.every"),
        ("eval_steps", "evaluation.every"),
    ):
        if key not in t.given:
            continue
        given = t.given[key]
        value = _number_of(given.value)
        if given.unresolved:
            t.consume(key, "dropped", {}, f"{given.unresolved}; give {ours} in RL steps")
            t.migration.assumptions.append(f"{key} of TRL is unknown here; give {ours} in RL steps")
        elif value is None or value <= 0:
            t.consume(key, "dropped", {}, "not set there")
        elif value < 1:
            t.consume(key, "dropped", {}, f"a share of the run; give {ours} in RL steps")
        elif t.ours("evaluation.every") == 0 and key == "eval_steps" and t.theirs("eval_strategy") == "no":
            t.consume(key, "dropped", {}, "eval_strategy=no: it has no effect there")
        elif optimizer_steps is None:
            t.consume(key, "dropped", {}, f"{unknown.text('the number of RL steps')}; give {ours} in RL steps")
        else:
            steps = max(1, round(value / optimizer_steps))
            kind, why = (
                ("taken", "") if steps == value else ("changed", f"optimizer steps: {optimizer_steps} an RL step")
            )
            t.consume(key, kind, {ours: steps}, why)


def _number(t: TranslationState, key: str, default: int | None, unknown: _Unknown) -> int | None:
    """Returns a figure of TRL, or its default if it is not set; None if unknown, with a dropped row."""
    if key not in t.given or t.given[key].value is None:
        return default
    given = t.given[key]
    if not given.unresolved and (number := _whole(given.value)):
        return number
    unknown.add(key)
    t.consume(key, "dropped", {}, given.unresolved or f"{shown(given.value)} is no whole number above 0")
    return None


def _number_of(value: Any) -> float | None:
    """Returns a number, also of a text such as 5e2, which YAML does not read as a number; None for other values."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value


def _whole(value: Any) -> int | None:
    """Returns a whole number above 0; None for other values."""
    number = _number_of(value)
    return (
        int(number) if number is not None and number > 0 and math.isfinite(number) and number == int(number) else None
    )


def _product(*factors: int | None) -> int | None:
    """Returns a product; None if a factor is unknown."""
    return None if None in factors else math.prod(factor or 0 for factor in factors)


def steps_decide(t: TranslationState) -> None:
    """Sets `run.epochs` to `ENDLESS` if TRL's or slime's number of steps is given, so `run.steps` alone ends the run.

    TRL and slime repeat the data until this number of steps. Changes the migration of `t` in place: the account gets a
    row `added`, and a given number of epochs a row `dropped`. Does nothing in other cases.
    """
    steps, epochs = STEPS_DECIDE.get(t.program, ("", ""))
    if steps not in t.given or not t.migration.settings.get("run.steps"):
        return
    settings, rows = t.migration.settings, t.migration.rows
    settings.pop("run.epochs", None)
    kept = [row for row in rows if "run.epochs" not in row.ours]
    given = any(row.theirs == epochs for row in rows if row not in kept)
    t.migration.rows = kept
    if given:
        t.consume(epochs, "dropped", {}, f"{steps} ends the run there, whatever the number of epochs")
    why = f"{t.program} repeats the data until {steps}: run.steps alone ends the run"
    t.migration.add("passes over the data", {"run.epochs": ENDLESS}, why)


def cluster(t: TranslationState) -> None:
    """Adds settings of GPUs to the translation: engines, policy ranks, nodes, residency; sets `open_layout`. Changes
    the translation in place; settings already present stay, except `cluster.nodes` if the GPUs need another number of
    nodes.

    With shared GPUs, engines fill the policy's GPUs; otherwise the nodes also cover the GPUs of the engines, as they
    already do in verl and NeMo-RL. A run of NeMo-RL gets the name of its file.
    """
    migration = t.migration
    nodes, gpus, tensor = t.ours("cluster.nodes"), t.ours("cluster.gpus_per_node"), t.ours("rollout.tensor")
    policy = nodes * gpus
    if t.program == "NeMo-RL":
        migration.add("the file's name", {"run.name": t.reading.file_name} if t.reading.file_name else {})
        _split_gpus(t)
    if t.ours("cluster.shared"):
        why = f"{policy} GPUs / rollout.tensor={tensor}"
        migration.add("engines on all GPUs", {"rollout.engines": max(1, policy // tensor)}, why)
        migration.add("shared GPUs", {"residency.keep": []}, "policy and engines take turns in a GPU's memory")
    elif t.program not in ("verl", "NeMo-RL"):
        engines = t.ours("rollout.engines") * tensor
        every = math.ceil((policy + engines) / gpus)
        migration.add("separate GPUs", {"policy.ranks": policy}, "the policy's GPUs; the engines have the others")
        if every != nodes:
            migration.settings.pop("cluster.nodes", None)
            why = f"{policy} GPUs of the policy and {engines} of the engines, {gpus} a node"
            migration.add("all nodes of the run", {"cluster.nodes": every}, why)
    if t.ours("cluster.nodes") > 1:
        why = "many processes import from a shared file system"
        migration.add("several nodes", {"cluster.start_timeout_s": START_SECONDS}, why)
    migration.add("GPUs", {"cluster.device": "cuda"})
    migration.open_layout = _cut_by_fsdp(t)


def _split_gpus(t: TranslationState) -> None:
    """Sets `policy.ranks` and `rollout.engines` from NeMo-RL's `ENGINES`, and adds rows for its two keys, which are
    dropped for shared GPUs. Without a number, or without a GPU left for the policy, sets nothing and adds an
    assumption."""
    if t.ours("cluster.shared"):
        for name in ("num_nodes", "gpus_per_node"):
            why = "policy.generation.colocated.enabled=true: it has no effect there"
            t.consume(f"{ENGINES}.{name}", "dropped", {}, why)
        return
    nodes, gpus, tensor = t.ours("cluster.nodes"), t.ours("cluster.gpus_per_node"), t.ours("rollout.tensor")
    given = [_whole(t.theirs(f"{ENGINES}.{name}")) for name in ("num_nodes", "gpus_per_node")]
    engine_gpus = (given[0] or 1) * (given[1] or gpus)
    policy = nodes * gpus - engine_gpus
    if given == [None, None] or policy < 1:
        problem = "does not say how many" if given == [None, None] else f"says {engine_gpus}, which leaves none,"
        t.migration.assumptions.append(
            f"the engines have GPUs of their own, and {ENGINES} {problem} of the {nodes * gpus} GPUs; "
            "give policy.ranks and rollout.engines"
        )
        settings: dict[str, Any] = {}
        why = "how many GPUs the engines have is unknown"
    else:
        settings = {"policy.ranks": policy, "rollout.engines": max(1, engine_gpus // tensor)}
        why = f"{engine_gpus} of {nodes * gpus} GPUs are the engines', each of rollout.tensor={tensor}"
    for name in ("num_nodes", "gpus_per_node"):
        if f"{ENGINES}.{name}" in t.given and t.theirs(f"{ENGINES}.{name}") is not None and settings:
            t.consume(f"{ENGINES}.{name}", "changed", settings, why)
        else:
            t.consume(f"{ENGINES}.{name}", "dropped", {}, "not set there" if settings else why)


def _cut_by_fsdp(t: TranslationState) -> bool:
    """True if the model was cut by FSDP or ZeRO, which has no tensor, pipeline or expert sizes."""
    if t.program == "TRL":
        return True
    if t.program == "NeMo-RL":
        return not t.theirs("policy.megatron_cfg.enabled")
    if t.program == "slime":
        return t.theirs("--train-backend") == "fsdp"
    megatron = any(".megatron." in key or ".megatron_config." in key for key in t.given)
    strategies = ("actor_rollout_ref.actor.strategy", "model_engine", "trainer.strategy", "--config-name")
    return not (megatron or any("megatron" in str(t.theirs(key)) for key in strategies))
