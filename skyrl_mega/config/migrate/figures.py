"""Counts of GPUs, engines, batches and steps, from several settings of the other program."""

from __future__ import annotations

import math
from typing import Any

from skyrl_mega.config.migrate.convert import sequences
from skyrl_mega.config.migrate.state import TranslationState

PROCESSES = 8
"""Assumed processes of TRL where the launcher's number is not given: one node of 8 GPUs."""
START_SECONDS = 1800
"""Time limit for the start on several nodes, as in `configs/cluster/`."""


def batches(t: TranslationState) -> None:
    """Translates TRL's batch sizes and steps, which depend on the number of processes."""
    if t.program != "TRL":
        return
    given = t.given["num_processes"].value if "num_processes" in t.given else t.reading.processes
    processes = int(given or PROCESSES)
    if not given:
        t.migration.assumptions.append(
            f"the number of processes is not given: {PROCESSES} GPUs are assumed (add --num_processes N)"
        )
    gpus = min(processes, 8)
    t.consume("num_processes", "changed", {"cluster.gpus_per_node": gpus, "cluster.nodes": math.ceil(processes / gpus)})
    t.migration.add(
        f"{processes} processes", {"cluster.gpus_per_node": gpus, "cluster.nodes": math.ceil(processes / gpus)}
    )
    samples = int(t.ours("data.samples_per_prompt"))
    per_device = _number(t, "per_device_train_batch_size", 8)
    accumulation = _number(t, "gradient_accumulation_steps", 1)
    iterations = _number(t, "num_iterations", 1)
    optimizer_batch = per_device * processes * accumulation
    generation = _number(t, "generation_batch_size", 0) or (
        per_device * processes * _number(t, "steps_per_generation", accumulation)
    )
    prompts, mini = max(1, generation // samples), max(1, min(optimizer_batch, generation) // samples)
    text = f"{generation} completions of a generation / {samples}, {optimizer_batch} of an optimizer step / {samples}"
    sizes: dict[str, Any] = {"data.prompts_per_step": prompts, "data.mini_batch_prompts": mini}
    for key in ("generation_batch_size", "steps_per_generation", "gradient_accumulation_steps"):
        t.consume(key, "changed", sizes, text)
    t.migration.add("TRL's batch", sizes, text)
    tokens = sequences(per_device, ["policy.micro_tokens"], None, t)
    t.consume("per_device_train_batch_size", "changed", {**sizes, **tokens[0]}, f"{text}; {tokens[1]}")
    t.migration.add("TRL's default per_device_train_batch_size=8", tokens[0], tokens[1])
    t.consume("num_iterations", "taken", {"data.epochs_per_step": iterations})
    _steps(t, math.ceil(prompts / mini) * iterations)


def _steps(t: TranslationState, optimizer_steps: int) -> None:
    """Translates TRL's intervals in optimizer steps to RL steps."""
    for key, ours in (
        ("max_steps", "run.steps"),
        ("save_steps", "checkpoint.every"),
        ("eval_steps", "evaluation.every"),
    ):
        if key not in t.given:
            continue
        value = t.given[key].value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            t.consume(key, "dropped", {}, "not set there")
        elif value < 1:
            t.consume(key, "dropped", {}, f"a share of the run; give {ours} in RL steps")
        elif t.ours("evaluation.every") == 0 and key == "eval_steps" and t.theirs("eval_strategy") == "no":
            t.consume(key, "dropped", {}, "eval_strategy=no: it has no effect there")
        else:
            steps = max(1, round(value / optimizer_steps))
            kind, why = (
                ("taken", "") if steps == value else ("changed", f"optimizer steps: {optimizer_steps} an RL step")
            )
            t.consume(key, kind, {ours: steps}, why)


def _number(t: TranslationState, key: str, default: int) -> int:
    value = t.given[key].value if key in t.given and not t.given[key].unresolved else None
    return int(value) if isinstance(value, int) and value > 0 else default


def cluster(t: TranslationState) -> None:
    """Adds engines, the policy's ranks and all nodes of the run, and says if the layout has to be chosen."""
    migration = t.migration
    nodes, gpus, tensor = t.ours("cluster.nodes"), t.ours("cluster.gpus_per_node"), t.ours("rollout.tensor")
    policy = nodes * gpus
    if t.ours("cluster.shared"):
        why = f"{policy} GPUs / rollout.tensor={tensor}"
        migration.add("engines on all GPUs", {"rollout.engines": max(1, policy // tensor)}, why)
        migration.add("shared GPUs", {"residency.keep": []}, "policy and engines take turns in a GPU's memory")
    elif t.program != "verl":
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


def _cut_by_fsdp(t: TranslationState) -> bool:
    """True if the model was cut by FSDP or ZeRO, which has no tensor, pipeline or expert sizes."""
    if t.program == "TRL":
        return True
    if t.program == "slime":
        return t.theirs("--train-backend") == "fsdp"
    megatron = any(".megatron." in key or ".megatron_config." in key for key in t.given)
    strategies = ("actor_rollout_ref.actor.strategy", "model_engine", "trainer.strategy", "--config-name")
    return not (megatron or any("megatron" in str(t.theirs(key)) for key in strategies))
