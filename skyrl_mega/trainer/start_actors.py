"""Starts a run's actors: policy, reference and critic with weights, and engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skyrl_mega.cluster.calls import gather, settle
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup, ActorSpec
from skyrl_mega.cluster.placement import Placement, on_gpus_of
from skyrl_mega.config.derived import (
    POLICY_ENVIRONMENT,
    critic_layout,
    critic_model,
    critic_ranks,
    engine_ranks,
    fp8_parameters,
    has_critic,
    length_limit,
    policy_ranks,
    policy_settings,
    reference_ranks,
)
from skyrl_mega.config.precision import environment as precision_environment
from skyrl_mega.config.residency import ENGINE, kept
from skyrl_mega.config.schema import Config, LayoutConfig, PolicyConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.engines.external.actor import ExternalEngine
from skyrl_mega.engines.external.open import ExternalSpec
from skyrl_mega.engines.external.open import specs as external_specs
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.megatron.actor import MegatronActor
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.megatron.role import CRITIC, POLICY, REFERENCE, ModelRole
from skyrl_mega.models.quantization import block_fp8, mxfp4
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.telemetry.stages import Stages
from skyrl_mega.trainer.placement import Reservations
from skyrl_mega.trainer.reference import ReferenceModel


@dataclass(frozen=True)
class Setup:
    """Everything needed to start a run's actors."""

    config: Config
    hf: dict[str, Any]
    """The model's config.json."""
    model: Path
    """The model's Hugging Face directory."""
    device: str
    """cpu or cuda."""
    folder: Path
    """The run's folder."""
    stack: ExitStack
    """Shuts the actors down on close."""
    say: Callable[[str], None]
    stages: Stages = field(default_factory=Stages)
    """Reports the stages of the start."""

    @property
    def logs(self) -> Path:
        """Folder for the actors' output: `<run folder>/logs`. May not exist yet: each process creates the folder."""
        return self.folder / "logs"

    @property
    def timeout_s(self) -> float:
        """Time limit for the start of a group of actors in seconds: `cluster.start_timeout_s`."""
        return self.config.cluster.start_timeout_s


class Actors(NamedTuple):
    """The started actors."""

    policy: TrainGroup
    reference: ReferenceModel | None
    """None without a KL coefficient."""
    critic: TrainGroup | None
    """None if the advantages need no critic."""
    engines: Fleet


def start_actors(setup: Setup, placement: Reservations) -> Actors:
    """Starts policy, reference and critic with weights, and engines with random weights, and returns them. The engines
    serve requests after the first weight sync. `setup.stack` ends all actors, also after an error here.

    On separate GPUs the engines start while the other models are built. On shared GPUs the engines start before any
    model is built: vLLM measures the free memory, and no other process may allocate meanwhile. There the engine parts
    that `residency.keep` does not keep are returned asleep.

    Raises:
        UserError: vLLM rejects the settings, a layout does not fit, or a model's directory is invalid.
        ActorFailed, ActorTimeout: An actor failed, or did not start within `setup.timeout_s`.
        ClusterError: Ray could not place an actor in time.
    """
    config = setup.config
    layout, rollout = config.policy.layout, config.rollout
    shared = config.cluster.shared and setup.device == "cuda"
    spawn = partial(spawn_ranks, setup, POLICY, layout, policy_ranks(config), placement.policy)
    boot = partial(start_engines, setup)
    with ThreadPoolExecutor(1) as background:
        if shared:
            group = spawn()
            booting = background.submit(boot, on_gpus_of(group.where, rollout.engines, gpus=engine_ranks(rollout)))
            engines = booting.result()
            if asleep := [part for part in ENGINE if part not in kept(config.residency.keep)]:
                engines.sleep(asleep)  # frees memory for building the models
        else:
            booting = background.submit(boot, placement.engines)
            group = spawn()
        policy = build_model(setup, group, POLICY, layout)
        load_weights(setup, policy, setup.model)
        reference = start_reference(setup, policy, placement.reference)
        critic = start_critic(setup, placement.critic)
        fleet = booting.result()
        if shared:
            fleet.make_room = partial(release_policy_cache, group, engine_ranks(rollout), setup.timeout_s, setup.say)
        return Actors(policy, reference, critic, fleet)


@contextmanager
def release_policy_cache(
    policy: ActorGroup, workers: int, timeout_s: float, say: Callable[[str], None], engine: int
) -> Iterator[None]:
    """Has the policy ranks on an engine's GPUs release torch's cached memory before the body of the `with` block, which
    restarts the engine.

    A rank can do so only between two calls. If a rank stays busy beyond the timeout, a line says so, and the engine may
    not fit.

    Args:
        policy: The policy's ranks; rank r shares the GPU of engine worker r.
        workers: Workers of an engine.
        timeout_s: Seconds to wait for the ranks.
        say: Prints a line.
        engine: Number of the engine.
    """
    ranks = range(engine * workers, (engine + 1) * workers)
    calls = [policy.submit(rank, "empty_cache") for rank in ranks]
    answers = settle(calls, timeout_s, after_failure=timeout_s).answers
    busy = [call.actor for call in calls if call not in answers]
    if busy:
        say(
            f"{', '.join(busy)} freed no GPU memory within {timeout_s:g} s; engine-{engine} restarts and may lack "
            "memory"
        )
    yield


def start_group(
    setup: Setup,
    name: str,
    actor_class: type,
    arguments: Sequence[dict[str, Any]],
    placement: Placement | None,
    env: dict[str, str] | None = None,
) -> ActorGroup:
    """Starts an actor for each of `arguments` and returns the group, by rank. `setup.stack` ends the group;
    after a failure here no actor is left.

    Args:
        setup: The run's settings and folder of logs.
        name: Name of the group.
        actor_class: Class of the actors.
        arguments: Arguments of the class, by rank.
        placement: Reserved places; None leaves the placement to Ray.
        env: Environment variables of the actors.

    Raises:
        UserError: The constructor of an actor raised the error.
        ActorFailed: A process died.
        ActorTimeout: A process did not start within `setup.timeout_s`.
    """
    with setup.stages.stage(name, "start processes", len(arguments)) as waiting:
        group = ActorGroup.spawn(
            name,
            actor_class,
            arguments,
            timeout=setup.timeout_s,
            placement=placement,
            env=env,
            logs=setup.logs,
            waiting=waiting,
        )
    setup.stack.callback(group.shutdown)
    return group


def spawn_ranks(
    setup: Setup, role: ModelRole, layout: LayoutConfig, ranks: int, placement: Placement | None
) -> ActorGroup:
    """Starts the actors of a Megatron model and returns the group, by rank. The actors are not connected and have no
    weights. `setup.stack` ends the group; after a failure here no actor is left.

    Args:
        setup: The run's settings, model and device.
        role: Policy, reference or critic.
        layout: The model's layout in the settings.
        ranks: Number of actors.
        placement: Reserved places; None leaves the placement to Ray.

    Raises:
        UserError: The model cannot be split into the layout.
        ActorFailed: A process died.
        ActorTimeout: A process did not start within `setup.timeout_s`.
    """
    config = setup.config
    parallel = layout_of(role, layout, ranks)
    architecture(setup.hf).check_layout(setup.hf, parallel, f"{role.name}.layout")
    shared = dict(
        parallel=parallel,
        hf=setup.hf,
        policy=settings_of(role, config),
        algorithm=config.algorithm,
        dtype=config.model.dtype,
        device=setup.device,
        role=role,
        value_clip=config.critic.value_clip,
        deterministic=config.run.deterministic,
    )
    arguments = [{"rank": rank, **shared} for rank in range(ranks)]
    return start_group(setup, role.name, MegatronActor, arguments, placement, rank_environment(config, setup.device))


def rank_environment(config: Config, device: str) -> dict[str, str]:
    """Returns the environment variables that a Megatron rank needs in addition to the driver's: on a CPU
    `OMP_NUM_THREADS`; on GPUs `CUDA_DEVICE_MAX_CONNECTIONS`, those of `precision_environment`, and with
    `run.deterministic` those of `POLICY_ENVIRONMENT`.

    Args:
        config: The settings.
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        return {"OMP_NUM_THREADS": str(config.policy.threads)}
    # Megatron orders its kernels on one connection. CUDA reads this on context creation, in `set_device`.
    exact = POLICY_ENVIRONMENT if config.run.deterministic else {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | precision_environment(config.policy.precision) | exact


def layout_of(role: ModelRole, layout: LayoutConfig, ranks: int) -> ParallelDims:
    """Returns the parallel sizes of a role's ranks; data parallelism takes the rest of `ranks`. Raises UserError, which
    names `<role>.layout`, if the sizes do not fit."""
    return ParallelDims.from_config(layout, ranks, key=f"{role.name}.layout")


def settings_of(role: ModelRole, config: Config) -> PolicyConfig:
    """Returns a role's settings for layers, optimizer and micro-batches: the critic's for `CRITIC`, the policy's for
    all others."""
    return policy_settings(replace(config, policy=critic_model(config)) if role is CRITIC else config)


def build_model(setup: Setup, group: ActorGroup, role: ModelRole, layout: LayoutConfig) -> TrainGroup:
    """Connects a role's actors to a process group, builds the model without weights on each, and returns the group as a
    `TrainGroup`. On a failure the whole group is ended.

    Args:
        setup: The run's settings, model and device.
        group: The role's actors, already started.
        role: The model's role.
        layout: Layout of the role's ranks.

    Raises:
        UserError: The settings or the model are not supported.
        ActorFailed, ActorTimeout: A rank failed, or was not ready within `setup.timeout_s`.
    """
    config, timeout = setup.config, setup.timeout_s
    with setup.stages.stage(role.name, "connect ranks and build the model", len(group)) as waiting:
        host = group.where[0].address
        port = group.call_one(0, "open_store", host, timeout, timeout=timeout)
        group.call_all("join", host, port, config.cluster.call_timeout_s, timeout=timeout, waiting=waiting)
    parallel = layout_of(role, layout, len(group))
    return TrainGroup(group, parallel, settings_of(role, config), config.cluster.call_timeout_s)


def load_weights(setup: Setup, model: TrainGroup, path: Path) -> None:
    """Loads the weights of the Hugging Face directory `path` into all ranks of a model, each rank its shard.

    Raises:
        UserError: The directory is invalid or belongs to another model.
        ActorFailed, ActorTimeout: A rank failed, or did not answer in time.
    """
    with setup.stages.stage(model.group.name, "load weights", len(model.group)) as waiting:
        model.load(path, waiting)


def start_reference(setup: Setup, policy: TrainGroup, placement: Placement | None) -> ReferenceModel | None:
    """Starts the reference model for KL, with weights of `reference.path` or of the policy's initial model, and returns
    it; returns None without a KL coefficient. The reference shares the policy's ranks unless `reference.layout` is set.

    Args:
        setup: The run's settings, model and device.
        policy: The policy, already started.
        placement: Reserved places of the reference's own ranks; None leaves the placement to Ray.

    Raises:
        UserError: The layout does not fit, or the model's directory is invalid.
        ActorFailed, ActorTimeout: A rank failed, or did not start within `setup.timeout_s`.
    """
    config = setup.config
    if not config.algorithm.kl.coefficient:
        return None
    path = Path(config.reference.path or setup.model)
    layout = config.reference.layout
    if layout is None:
        with setup.stages.stage(POLICY.name, "load the reference's weights", len(policy.group)) as waiting:
            policy.keep_reference(path, waiting)
        return ReferenceModel(policy)
    group = spawn_ranks(setup, REFERENCE, layout, reference_ranks(config), placement)
    reference = build_model(setup, group, REFERENCE, layout)
    load_weights(setup, reference, path)
    return ReferenceModel(policy, reference)


def start_critic(setup: Setup, placement: Placement | None) -> TrainGroup | None:
    """Starts the critic with the weights of `critic.path`, or of the run's model, and returns its ranks; returns None
    if advantages need no critic.

    Args:
        setup: The run's settings, model and device.
        placement: Reserved places; None leaves the placement to Ray.

    Raises:
        UserError: The layout does not fit, or the model's directory is invalid.
        ActorFailed, ActorTimeout: A rank failed, or did not start within `setup.timeout_s`.
    """
    config = setup.config
    if not has_critic(config):
        return None
    layout = critic_layout(config)
    critic = build_model(setup, spawn_ranks(setup, CRITIC, layout, critic_ranks(config), placement), CRITIC, layout)
    load_weights(setup, critic, Path(config.critic.path or setup.model))
    return critic


def length_arguments(config: Config) -> dict[str, Any]:
    """Returns the vLLM arguments that raise the longest sequence of the model's config.json to `model.max_length`; {}
    without this setting."""
    longest = config.model.max_length
    return {"hf_overrides": {"max_position_embeddings": longest}} if longest else {}


def engine_spec(setup: Setup, weights: str = "dummy") -> EngineSpec:
    """Returns the spec of the run's vLLM engines.

    Args:
        setup: The run's settings, model and device.
        weights: `dummy` starts with random weights, `auto` loads the model directory.

    Raises:
        UserError: The model's directory has an unsupported quantisation.
    """
    config = setup.config
    return EngineSpec(
        path=str(setup.model),
        dtype=config.model.dtype,
        device=setup.device,
        rollout=config.rollout,
        max_length=length_limit(config.rollout),
        weights=weights,
        dequantised=mxfp4(setup.hf) or (block_fp8(setup.hf) is not None and not fp8_parameters(config.rollout)),
        seed=config.run.seed,
        routes=config.policy.moe.replay == "rollout" and weights == "dummy",  # without a policy, nothing replays routes
        updated_under_way=config.asynchrony.mode == "full",
        extra=length_arguments(config),
        transport=config.weights.transport,
        sleeps=tuple(part for part in ENGINE if part not in kept(config.residency.keep) and weights == "dummy"),
        deterministic=config.run.deterministic,
    )


def start_engines(setup: Setup, placement: Placement | None, weights: str = "dummy") -> Fleet:
    """Starts the vLLM engines, connects the servers of `rollout.endpoints` (only with `dummy` weights), and returns the
    fleet, with all engines up. `setup.stack` ends the engines, also after a failure here.

    Args:
        setup: The run's settings, model and device.
        placement: Reserved places; None leaves the placement to Ray.
        weights: `dummy`: the engines start with random weights, and the first sync delivers the policy's. `auto`: the
            engines load the model directory.

    Raises:
        UserError: vLLM rejects the settings, or a server does not fit the run.
        ActorFailed: An engine failed to start, or a server failed.
        ActorTimeout: The processes did not start, or did not load the model, within `setup.timeout_s` each.
    """
    config, spec = setup.config, engine_spec(setup, weights)
    arguments = [{"spec": spec}] * config.rollout.engines
    group = start_group(setup, "engine", VllmEngine, arguments, placement, environment(spec))
    with setup.stages.stage("engine", "load the model", config.rollout.engines) as waiting:
        facts = group.call_all("start", timeout=setup.timeout_s, waiting=waiting)
    if config.rollout.endpoints and weights == "dummy":
        decoder = architecture(setup.hf).describe(setup.hf)
        facts += reach_servers(setup, group, external_specs(config, decoder.vocab, decoder.experts is not None))
    fleet = Fleet(group, restarts=config.rollout.restarts, start_timeout_s=setup.timeout_s, say=setup.say, facts=facts)
    fleet.joined.update(range(config.rollout.engines, len(group)))  # a lost server does not end the run
    setup.stack.callback(fleet.close)
    return fleet


def reach_servers(setup: Setup, group: ActorGroup, servers: Sequence[ExternalSpec]) -> list[Facts]:
    """Adds an actor for each server of `rollout.endpoints` to the group of engines, waits until the servers answer, and
    returns their facts in the order of `servers`; [] without servers.

    Raises:
        UserError: A server does not fit the run's settings, such as its vocabulary or context length.
        ActorFailed: A server failed or refused.
        ActorTimeout: A server did not answer within `setup.timeout_s`.
    """
    if not servers:
        return []
    first = len(group)
    with setup.stages.stage("engine", "reach the servers of rollout.endpoints", len(servers)) as waiting:
        group.extend([ActorSpec(ExternalEngine, {"spec": spec}) for spec in servers], timeout=setup.timeout_s)
        calls = [group.submit(rank, "start") for rank in range(first, len(group))]
        return gather(calls, setup.timeout_s, waiting)
