"""Puts a run together.

Actors up, weights loaded or restored, engines connected, all of it taken down again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup, settle
from skyrl_mega.cluster.local import session
from skyrl_mega.cluster.placement import Placement, beside
from skyrl_mega.config.checks import check_enough
from skyrl_mega.config.derived import gpus_needed, length_limit, policy_ranks, reference_ranks, response_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.data.rows import load_demonstrations, load_prompts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.registry import with_absolute_paths
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.registry import architecture
from skyrl_mega.policy.actor import PolicyActor
from skyrl_mega.policy.policy import Policy
from skyrl_mega.preflight import preflight
from skyrl_mega.retriever.session import service_of
from skyrl_mega.rollout.chat import Chat
from skyrl_mega.rollout.engine import Engine
from skyrl_mega.rollout.engine_spec import EngineSpec, environment
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.metrics import MetricsWriter, read
from skyrl_mega.trainer.checkpoints import Checkpoints
from skyrl_mega.trainer.evaluation import Evaluator
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.sampler import Sampler
from skyrl_mega.trainer.seats import Seats, find_seats
from skyrl_mega.trainer.warmup import encode, warm_up
from skyrl_mega.weights.headers import read_config
from skyrl_mega.weights.sync import WeightSync


@contextmanager
def open_run(config: Config, folder: Path, console: Console) -> Iterator[Run]:
    """A run that is ready for its first step: the engines hold the policy's weights. Leaves no process behind."""
    config = replace(config, environment=with_absolute_paths(config.environment))
    logs = folder / "logs"
    model = Path(config.model.path).absolute()
    hf = read_config(model)
    chat = Chat(str(model))
    chat.check_vocabulary(architecture(hf).describe(hf).vocab)
    train, evaluation = prompts_of(config, chat, console)
    device = config.cluster.device
    with ExitStack() as stack:
        config = replace(config, environment=stack.enter_context(service_of(config.environment, logs, console.say)))
        with console.phase("start ray"):
            actors = policy_ranks(config) + config.rollout.engines * config.rollout.tensor
            stack.enter_context(
                session(
                    actors=actors,
                    gpus=gpus_needed(config) if device == "cuda" else 0,
                    nodes=config.cluster.nodes,
                    timeout_s=config.cluster.start_timeout_s,
                    say=console.say,
                )
            )
        preflight.before_run(config, model, folder, console)
        with console.phase("start engines and policy"):
            seats = find_seats(config, device)
            policy, reference, fleet = start_actors(config, hf, model, device, folder, stack, console.say, seats)
        if seats.policy:  # there is more than one node, or a GPU for each
            console.say(f"policy ranks sit on {policy.group.seating}")
            console.say(f"engines sit on {fleet.group.seating}")

        generator = Generator(fleet, chat, config.rollout, config.environment)
        stream = PromptStream(
            len(train),
            batch=config.data.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            epochs=config.run.epochs,
        )
        run = Run(
            config=config,
            folder=folder,
            console=console,
            metrics=stack.enter_context(MetricsWriter(folder, tensorboard=config.telemetry.tensorboard)),
            policy=policy,
            reference=reference,
            sync=WeightSync(
                policy.group, fleet, hf, policy.parallel, config, device=device, plans=folder.absolute() / "plans"
            ),
            sampler=Sampler(config, train, stream, generator),
            evaluator=Evaluator(config, evaluation, generator, console.say),
            stream=stream,
            checkpoints=Checkpoints(folder / "checkpoints", config.checkpoint.keep, console.say),
            response_limit=response_limit(config.rollout),
        )
        if not run.restore() and config.warmup.steps:
            learn_first(run, chat)
        run.metrics.rewind(run.step or -1)  # the evaluation before the first step is done again
        run.health.remember(read(run.metrics.path))
        with console.phase("connect weights"):
            run.sync.sync(run.step)
        generator.look = run.notice.look
        generator.refill = lambda: run.sync.sync(run.step)
        yield run


def learn_first(run: Run, chat: Chat) -> None:
    """The supervised warm-up, and the checkpoint that makes it unnecessary to repeat."""
    demonstrations = encode(load_demonstrations(run.config.warmup.files), chat)
    with run.console.phase("supervised warm-up", total=run.config.warmup.steps) as progress:
        loss = warm_up(run.policy, demonstrations, run.config, progress.update)
    run.console.say(f"supervised warm-up: {run.config.warmup.steps} steps, last loss {loss:.3f} nats per token")
    if run.config.checkpoint.every:
        run.save()


def prompts_of(config: Config, chat: Chat, console: Console) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts that fit `rollout.max_prompt_tokens`; says how many do not."""
    kept: list[list[Prompt]] = []
    for key, files, limit in (
        ("data.train", config.data.train, None),
        ("data.eval", config.data.eval, config.evaluation.limit),
    ):
        prompts = load_prompts(files, config.environment, key=key, limit=limit) if files else []
        limit_tokens = config.rollout.max_prompt_tokens
        fits = [p for p in prompts if len(chat.prompt(p.messages, f"{key}, row {p.uid}")) <= limit_tokens]
        if len(fits) < len(prompts):
            console.say(
                f"{key}: {len(prompts) - len(fits)} of {len(prompts)} prompts are longer than "
                f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and are left out"
            )
        if prompts and not fits:
            raise UserError(
                f"rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}: all {len(prompts)} prompts of {key} "
                f"are longer, the shortest has {min(len(chat.first(p.messages)) for p in prompts)} tokens; give more"
            )
        kept.append(fits)
    check_enough(config, len(kept[0]), "prompts of data.train fit rollout.max_prompt_tokens")
    return kept[0], kept[1]


def start_actors(
    config: Config,
    hf: dict[str, Any],
    model: Path,
    device: str,
    folder: Path,
    stack: ExitStack,
    say: Callable[[str], None],
    seats: Seats,
) -> tuple[Policy, Callable[..., Any] | None, Fleet]:
    """Policy and reference with their weights, and engines, side by side.

    On GPUs that they share the engines come up first: vLLM measures what is free of the memory, and nobody else may
    be taking some of it meanwhile.
    """
    ranks, layout, rollout = policy_ranks(config), config.policy.layout, config.rollout
    spawn = partial(spawn_policy, config, hf, "policy", layout, ranks, device, folder, stack, seats.policy)
    boot = partial(start_engines, config, model, device, folder, stack, say)
    with ThreadPoolExecutor(1) as background:
        if config.cluster.shared and device == "cuda":
            group = spawn()
            booting = background.submit(boot, beside(group.where, rollout.engines, gpus=rollout.tensor))
            booting.result()
        else:
            booting = background.submit(boot, seats.engines)
            group = spawn()
        policy = build_policy(config, group, "policy", layout)
        policy.load(model)
        reference = start_reference(config, hf, policy, model, device, folder, stack, seats.reference)
        fleet = booting.result()
        if config.cluster.shared and device == "cuda":
            fleet.make_room = partial(make_room, group, rollout.tensor, config.cluster.start_timeout_s, say)
        return policy, reference, fleet


def make_room(policy: ActorGroup, tensor: int, timeout_s: float, say: Callable[[str], None], engine: int) -> None:
    """Has the policy ranks on an engine's GPUs give back what torch keeps for later, before the engine starts again.

    A rank does so between two calls: one that is busy for longer keeps it, and the engine may then not fit.
    """
    ranks = range(engine * tensor, (engine + 1) * tensor)
    calls = [policy.submit(rank, "empty_cache") for rank in ranks]
    answers = settle(calls, timeout_s, after_failure=timeout_s).answers
    kept = [call.actor for call in calls if call not in answers]
    if kept:
        say(f"{', '.join(kept)} gave no memory back within {timeout_s:g} s for engine-{engine}, which starts again")


def spawn_policy(
    config: Config,
    hf: dict[str, Any],
    name: str,
    layout: LayoutConfig,
    ranks: int,
    device: str,
    folder: Path,
    stack: ExitStack,
    placement: Placement | None,
    trainable: bool = True,
) -> ActorGroup:
    """Policy actors, each alone and without a model."""
    parallel = layout_of(name, layout, ranks)
    architecture(hf).check_layout(hf, parallel, f"{name}.layout")
    shared = dict(
        parallel=parallel,
        hf=hf,
        policy=config.policy,
        algorithm=config.algorithm,
        dtype=config.model.dtype,
        device=device,
        trainable=trainable,
    )
    timeout = config.cluster.start_timeout_s
    group = ActorGroup.spawn(
        name,
        PolicyActor,
        [{"rank": rank, **shared} for rank in range(ranks)],
        timeout=timeout,
        placement=placement,
        # Megatron orders its kernels on one connection; a device reads this when its context is made, in `set_device`.
        env={"OMP_NUM_THREADS": str(config.policy.threads)}
        if device == "cpu"
        else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        logs=folder / "logs",
    )
    stack.callback(group.shutdown)
    return group


def layout_of(name: str, layout: LayoutConfig, ranks: int) -> Parallel:
    """The layout of the policy or of the reference."""
    return Parallel.from_config(layout, ranks, key=f"{name}.layout")


def build_policy(config: Config, group: ActorGroup, name: str, layout: LayoutConfig) -> Policy:
    """Joins policy actors and builds the model in them, without weights."""
    timeout = config.cluster.start_timeout_s
    host = group.where[0].address
    port = group.call_one(0, "open_store", host, timeout, timeout=timeout)
    group.call_all("join", host, port, config.cluster.call_timeout_s, timeout=timeout)
    return Policy(group, layout_of(name, layout, len(group)), config.policy, config.cluster.call_timeout_s)


def start_reference(
    config: Config,
    hf: dict[str, Any],
    policy: Policy,
    model: Path,
    device: str,
    folder: Path,
    stack: ExitStack,
    placement: Placement | None,
) -> Callable[..., Any] | None:
    """Log-probs of the reference for KL.

    None without a coefficient; the policy's own ranks unless it has a layout of its own.
    """
    if not config.algorithm.kl.coefficient:
        return None
    path = Path(config.reference.path or model)
    if config.reference.layout is None:
        policy.keep_reference(path)
        return partial(policy.logprobs, reference=True)
    layout = config.reference.layout
    group = spawn_policy(
        config, hf, "reference", layout, reference_ranks(config), device, folder, stack, placement, trainable=False
    )
    reference = build_policy(config, group, "reference", layout)
    reference.load(path)
    return reference.logprobs


def longer(config: Config) -> dict[str, Any]:
    """vLLM's arguments for a model whose sequences may be longer than its config.json says (`model.max_length`)."""
    longest = config.model.max_length
    return {"hf_overrides": {"max_position_embeddings": longest}} if longest else {}


def start_engines(
    config: Config,
    model: Path,
    device: str,
    folder: Path,
    stack: ExitStack,
    say: Callable[[str], None],
    placement: Placement | None,
    weights: str = "dummy",
) -> Fleet:
    """vLLM engines. With dummy weights the first sync brings the policy's; with `auto` they are the directory's."""
    spec = EngineSpec(
        path=str(model),
        dtype=config.model.dtype,
        device=device,
        rollout=config.rollout,
        max_length=length_limit(config.rollout),
        weights=weights,
        seed=config.run.seed,
        extra=longer(config),
    )
    timeout = config.cluster.start_timeout_s
    group = ActorGroup.spawn(
        "engine",
        Engine,
        [{"spec": spec}] * config.rollout.engines,
        timeout=timeout,
        placement=placement,
        env=environment(spec),
        logs=folder / "logs",
    )
    stack.callback(group.shutdown)
    facts = group.call_all("start", timeout=timeout)
    fleet = Fleet(group, restarts=config.rollout.restarts, start_timeout_s=timeout, say=say, facts=facts)
    stack.callback(fleet.close)
    return fleet
