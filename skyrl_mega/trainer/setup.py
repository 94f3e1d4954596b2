"""Assembles a run: starts actors, loads or restores weights, connects engines, and tears everything down at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.cluster.temporary_files import temporary_folder
from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_enough
from skyrl_mega.config.derived import (
    critic_ranks,
    engine_ranks,
    gpus_needed,
    policy_ranks,
    reference_ranks,
)
from skyrl_mega.config.drafts import draft_method
from skyrl_mega.config.pools import labelled_nodes, total_nodes
from skyrl_mega.config.schema import Config
from skyrl_mega.data.fingerprint import fingerprint
from skyrl_mega.data.order import PromptStream
from skyrl_mega.data.rows import load_demonstrations, load_prompts
from skyrl_mega.envs import registry
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.registry import with_absolute_paths
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.hf_checkpoint.versions import VersionDirectories
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.models.registry import architecture
from skyrl_mega.preflight import preflight
from skyrl_mega.retriever.session import running_service
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.event_loop import BackgroundLoop, EventLoop
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.rollout.service import RolloutService
from skyrl_mega.rollout.workers.group import Workers
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.telemetry.stages import Stages
from skyrl_mega.telemetry.timeline import Timeline
from skyrl_mega.telemetry.trackers.trackers import open_trackers
from skyrl_mega.trainer import start_facts
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.checkpoints import Checkpoints
from skyrl_mega.trainer.elastic import elastic_engines, refuse_private_cluster
from skyrl_mega.trainer.evaluation import Evaluator
from skyrl_mega.trainer.measurements import Measurements
from skyrl_mega.trainer.meters import Meters
from skyrl_mega.trainer.one_step_ahead import OneStepAhead
from skyrl_mega.trainer.placement import reserve_run
from skyrl_mega.trainer.profile import Profiler
from skyrl_mega.trainer.residency import Residency
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.rollouts_ahead import Rollouts
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.sft_warmup import encode, warm_up
from skyrl_mega.trainer.shutdown import ShutdownRequest
from skyrl_mega.trainer.start_actors import Actors, Setup, start_actors
from skyrl_mega.trainer.start_workers import start_workers
from skyrl_mega.trainer.timelines import Timelines
from skyrl_mega.trainer.trust import Trust
from skyrl_mega.weights.files.driver import store_address
from skyrl_mega.weights.files.store import SCHEME
from skyrl_mega.weights.sync import WeightSync


@contextmanager
def open_run(config: Config, folder: Path, console: Console) -> Iterator[Run]:
    """Starts a run's processes, restores the newest checkpoint or runs a configured SFT warm-up, syncs the engines and
    yields the run; ends everything with the block. Raises UserError if a setting or file is unusable, ActorFailed or
    ClusterError if a process or node fails, OSError if a file cannot be written."""
    torch.set_num_threads(1)  # cutting a batch takes no time, but more threads would spin on cores of ranks and engines
    config = with_absolute_files(config)
    logs = folder / "logs"
    model = Path(config.model.path).absolute()
    hf = read_config(model)
    stages = Stages(console)
    console.note(start_facts.started_event(config, hf))
    with stages.phase("read data"):
        chat = Renderer(str(model), config.rollout)
        chat.check_vocabulary(architecture(hf).describe(hf).vocab)
        train, evaluation = prompts_of(config, chat, console)
    with ExitStack() as stack:
        config = replace(
            config, environment=stack.enter_context(running_service(config.environment, logs, console.say))
        )
        with stages.phase("start ray"):
            stack.enter_context(ray_of(config, console))
        preflight.before_run(config, model, folder, console)
        setup = Setup(config, hf, model, config.cluster.device, folder, stack, say=console.say, stages=stages)
        started, workers = start_all(setup, console)
        policy, reference, critic, fleet = started

        timeline = Timeline() if config.telemetry.timeline else None
        generator = stack.enter_context(generator_of(config, fleet, chat, workers, timeline))
        stream, shutdown = stream_of(config, len(train)), ShutdownRequest()
        source = RolloutSource(config, train, stream, generator)
        run = Run(
            config=config,
            folder=folder,
            console=console,
            trackers=stack.enter_context(open_trackers(config, folder, console.say)),
            policy=policy,
            reference=reference,
            critic=critic,
            sync=weight_sync(setup, policy, fleet),
            rollouts=rollouts_of(source, stack, shutdown.raise_if_requested, lambda: run.resync_restarted_engines()),
            evaluator=Evaluator(config, evaluation, generator, console.say),
            stream=stream,
            checkpoints=Checkpoints(folder / "checkpoints", config.checkpoint.keep, console.say),
            measurements=measurements_of(setup, started, generator),
            residency=Residency.of(config, policy, critic, fleet),
            shutdown=shutdown,
        )
        stack.callback(run.rollouts.close)
        stack.callback(run.records.close)
        with stages.phase("restore"):
            restored = run.restore()
        if not restored and config.warmup.steps:
            sft_warmup(run, chat)
        run.trackers.start(config, run.step or None)  # None: repeats the initial evaluation
        run.health.remember(read(run.trackers.path))
        with stages.phase("connect weights"):
            run.sync_engines()
        generator.look = shutdown.raise_if_requested
        generator.refill = run.resync_restarted_engines
        yield run


def with_absolute_files(config: Config) -> Config:
    """Returns the settings with absolute paths of the user's files, for processes that start in another folder. Raises
    UserError if an environment's class cannot be imported."""
    loss, generator = imports.absolute(config.algorithm.loss), config.rollout.generator
    return replace(
        config,
        environment=with_absolute_paths(config.environment),
        algorithm=replace(config.algorithm, loss=loss),
        rollout=replace(config.rollout, generator=generator and imports.absolute(generator)),
    )


def weight_sync(setup: Setup, policy: TrainGroup, fleet: Fleet) -> WeightSync:
    """Returns the weight sync from the policy to the engines; weights for engines that read Hugging Face directories
    are written beside the run's weight files. A server of `rollout.endpoints` serves only after its log-probs are the
    policy's."""
    config, run_folder = setup.config, setup.folder.absolute()
    address = store_address(config, run_folder)
    folder = run_folder if SCHEME in address else Path(address)
    directory = VersionDirectories(folder / "directories", lambda path: policy.export(path, setup.model))
    sync = WeightSync(
        policy.group, fleet, setup.hf, config, plans=run_folder / "plans", say=setup.say, directory=directory
    )
    if config.rollout.endpoints or config.rollout.elastic.most:
        vocab = architecture(setup.hf).describe(setup.hf).vocab
        sync.verify = Trust(config, policy, fleet, vocab, setup.say).verify
    return sync


def start_all(setup: Setup, console: Console) -> tuple[Actors, Workers | None]:
    """Starts policy, reference, critic, engines and rollout workers, and returns the actors and the rollout workers.
    Records the nodes as an event, and prints the ranks on each node unless all are on one node without GPUs. From then
    on engines may join and leave (`rollout.elastic`).

    The rollout workers are None if trajectories run in threads of the driver. All processes end with `setup.stack`,
    also after an error here.

    Raises UserError if a setting or file is unusable, ActorFailed or ClusterError if a process or node fails, OSError
    if a file cannot be written.
    """
    with setup.stages.phase("start engines and policy"):
        placement = reserve_run(setup.config, setup.device)
        actors = start_actors(setup, placement)
        workers = start_workers(setup)
    groups = {"policy ranks": actors.policy.group, "engines": actors.engines.group}
    if workers is not None:
        groups["rollout workers"] = workers.group
    console.note(start_facts.placed_event(groups))
    if placement.policy:  # set with several nodes or with GPUs
        for name, group in groups.items():
            console.say(f"{name}: {group.ranks_by_node}")
    setup.stack.enter_context(elastic_engines(setup, actors.engines))
    return actors, workers


def ray_of(config: Config, console: Console) -> AbstractContextManager[None]:
    """Returns a context manager that starts or joins Ray with enough resources for the run's actors.

    Entering the block raises UserError if RAY_ADDRESS is unusable, ClusterError if Ray does not start or refuses the
    connection, and NodesMissing if nodes do not join in time. An ActorFailed or a ClusterError inside the block becomes
    NodeLost if a node is gone.

    Raises:
        UserError: Engines should join by their nodes, and RAY_ADDRESS is not set.
    """
    refuse_private_cluster(config.rollout.elastic)
    trained = policy_ranks(config) + reference_ranks(config) + critic_ranks(config)
    actors = trained + config.rollout.engines * engine_ranks(config.rollout) + config.environment.processes
    gpus = gpus_needed(config) if config.cluster.device == "cuda" else 0
    nodes, limit = total_nodes(config), config.cluster.start_timeout_s
    pool = labelled_nodes(config)
    return session(actors=actors, gpus=gpus, nodes=nodes, pool=pool, timeout_s=limit, say=console.say)


def generator_of(
    config: Config, fleet: Fleet, chat: Renderer, workers: Workers | None, timeline: Timeline | None = None
) -> Generator:
    """Returns a generator on the run's engines; the caller closes it by a `with` block. With `asynchrony.mode=full`,
    its event loop already runs in a thread.

    Args:
        config: The settings.
        fleet: The engines.
        chat: Tokenizer and chat template.
        workers: The rollout workers; None runs trajectories in this process.
        timeline: Receives the activity of engines and environments; concurrent generators share a timeline. None
            records nothing.
    """
    return Generator(
        fleet,
        chat,
        config.rollout,
        config.environment,
        reward_weights=config.algorithm.reward_weights,
        lockstep=config.run.deterministic,
        loop=BackgroundLoop() if config.asynchrony.mode == "full" else EventLoop(),
        workers=workers,
        timeline=timeline,
    )


def rollouts_of(
    source: RolloutSource, stack: ExitStack, look: Callable[[], None], refill: Callable[[], None]
) -> Rollouts:
    """Returns the rollouts for `asynchrony.mode`: `source` itself, `OneStepAhead` or `Asynchronous`. Evaluations keep
    using the source's generator.

    Args:
        source: The rollouts for `asynchrony.mode=off`.
        stack: Closes everything started here.
        look: Raises an exception if the run must end.
        refill: Restores service after all engines failed.

    Raises:
        UserError: The generator of `rollout.generator` cannot be imported or created.
    """
    config, generator = source.config, source.generator
    if config.asynchrony.mode == "off":
        return source
    if config.asynchrony.mode == "one_step":  # its thread needs a separate generator
        shared = generator.workers, generator.timeline if generator.counts_are_read else None
        own_generator = stack.enter_context(generator_of(config, generator.fleet, generator.chat, *shared))
        own_generator.recorder, own_generator.slots.use = generator, generator.slots.use
        return OneStepAhead(RolloutSource(config, source.prompts, source.stream, own_generator), config, look, refill)
    assert isinstance(generator.loop, BackgroundLoop)
    own, sampling = config.rollout.generator is not None, config.rollout.sampling
    player = generator.group_player(sampling, service=True) if own else generator.player(sampling, service=True)
    service = RolloutService(player, generator.fleet, generator.loop, config.rollout.request_timeout_s, own=own)
    return Asynchronous(config, source.prompts, source.stream, service, look=look, refill=refill)


def measurements_of(setup: Setup, actors: Actors, generator: Generator) -> Measurements:
    """Returns the meters, profiler and timelines for a run's steps; starts and writes nothing."""
    config, policy, fleet = setup.config, actors.policy.group, actors.engines
    models = actors.policy, actors.reference and actors.reference.ranks, actors.critic
    profiler = Profiler(config.telemetry.profile, setup.folder, policy, fleet=fleet, generator=generator, say=setup.say)
    groups = {model.group.name: model.group for model in models if model}
    meters = Meters(groups, fleet, drafts=bool(draft_method(config.rollout)))
    slots = generator.slots.use if generator.slots.most is not None else None
    concurrent_calls = config.environment.workers
    timelines = Timelines(setup.folder, generator.timeline, engines=fleet.out_of_service, slots=concurrent_calls)
    written_timelines = timelines if generator.counts_are_read else None
    return Measurements(config, architecture(setup.hf).describe(setup.hf), meters, profiler, slots, written_timelines)


def stream_of(config: Config, prompts: int) -> PromptStream:
    """Returns the stream of indices of training prompts, from the start of the data. Reads the data files, for a
    fingerprint. Raises OSError if a data file cannot be read.

    Args:
        config: The settings: batch, seed, shuffling, epochs and data files.
        prompts: Number of training prompts.
    """
    return PromptStream(
        prompts,
        batch=config.data.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.run.epochs,
        rows=fingerprint(config.data.train),
    )


def sft_warmup(run: Run, chat: Renderer) -> None:
    """Runs the supervised warm-up of the policy, prints the last loss and, unless `checkpoint.every` is 0, saves a
    checkpoint, so that a resumed run does not repeat the warm-up.

    A critic without a separate path starts from the policy's weights after the warm-up.

    Raises:
        UserError: The demonstrations are invalid.
        ActorFailed: A rank failed.
        DiskFull: No space is left for the checkpoint.
        ClusterError, OSError: The checkpoint could not be written.
    """
    run.residency.enter("train")
    demonstrations = encode(load_demonstrations(run.config.warmup.files), chat, run.config.environment)
    with run.console.phase("supervised warm-up", total=run.config.warmup.steps) as progress:
        loss = warm_up(run.policy, demonstrations, run.config, progress.update)
    run.console.say(f"supervised warm-up: {run.config.warmup.steps} steps, last loss {loss:.3f} nats per token")
    if run.critic and not run.config.critic.path:
        with temporary_folder(run.folder, ".warmed_up.") as folder:
            run.policy.export(folder / "model", Path(run.config.model.path).absolute())
            run.critic.load(folder / "model")
    if run.config.checkpoint.every:
        run.save()


def prompts_of(config: Config, chat: Renderer, console: Console) -> tuple[list[Prompt], list[Prompt]]:
    """Loads the prompts of `data.train` and of `data.eval` (at most `evaluation.limit`; [] without files), and returns
    the two lists without prompts longer than `rollout.max_prompt_tokens` or surely longer than a sequence. Prints the
    number of longer prompts.

    Raises:
        UserError: A data file is invalid, an environment's class cannot be used, the chat template rejects a prompt or
            cannot offer an environment's tools, a token is outside the model's vocabulary, all prompts of a setting are
            too long, or the training prompts left are too few for a step.
    """
    kept: list[list[Prompt]] = []
    for key, files, limit in (
        ("data.train", config.data.train, None),
        ("data.eval", config.data.eval, config.evaluation.limit),
    ):
        prompts = load_prompts(files, config.environment, key=key, limit=limit) if files else []
        limit_tokens = config.rollout.max_prompt_tokens
        tools = {name: registry.tools(name, config.environment) for name in {p.env_class for p in prompts}}
        for name in sorted(tools):
            if registry.has_tools(name, config.environment):
                chat.check_tools(name)
        fits = [
            p
            for p in prompts
            if chat.prompt(p.messages, f"{key}, row {p.uid}", tools[p.env_class], limit_tokens) is not None
        ]
        if len(fits) < len(prompts):
            console.say(
                f"{key}: {len(prompts) - len(fits)} of {len(prompts)} prompts are longer than "
                f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and are left out"
            )
        if prompts and not fits:
            raise UserError(
                f"all {len(prompts)} prompts of {key} are longer{_shortest(prompts, chat, tools)}; give a larger limit",
                key="rollout.max_prompt_tokens",
                value=config.rollout.max_prompt_tokens,
            )
        kept.append(fits)
    check_enough(config, len(kept[0]), "prompts of data.train fit rollout.max_prompt_tokens")
    return kept[0], kept[1]


def _shortest(prompts: list[Prompt], chat: Renderer, tools: Mapping[str, list[dict[str, Any]]]) -> str:
    """Returns a phrase with the token count of the shortest prompt; empty if even this is too long to tokenize."""
    shortest = min(prompts, key=lambda prompt: sum(len(message["content"]) for message in prompt.messages))
    tokens = chat.prompt(shortest.messages, "the shortest", tools[shortest.env_class])
    return f", the shortest text has {len(tokens)} tokens" if tokens is not None else ""
