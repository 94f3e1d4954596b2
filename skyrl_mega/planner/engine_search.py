"""Combines engines with a policy: which engines fit, and how fast they generate. The inner part of the layout
search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_mega.cluster.run_placement import plan_placement, pool_nodes_needed
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import expert_parallel, fp8_parameters, has_critic
from skyrl_mega.config.pools import engine_cluster, engine_view
from skyrl_mega.config.residency import CRITIC, POLICY, resident
from skyrl_mega.config.schema import Config, RolloutConfig
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.engine import check, check_blocks
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import engine_blocks
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import engine_memory, gpu_bytes, policy_memory
from skyrl_mega.planner.processes import EngineMemory
from skyrl_mega.planner.shared import stage_ranks
from skyrl_mega.planner.times import generate_time

FRACTIONS = {False: (0.9,), True: tuple(round(0.05 * k, 2) for k in range(2, 19))}
"""Candidates for `rollout.memory_fraction` besides the given value, by `cluster.shared`."""
KEEPS: tuple[tuple[str, ...] | None, ...] = (
    None,
    ("parameters", "gradients", "optimizer"),
    ("parameters", "optimizer"),
    ("parameters",),
    ("optimizer",),
    (),
)
"""Candidates for `residency.keep` on shared GPUs. Only null (keep everything) keeps parts of engines, as sleeping
engines copy nothing. Gradients are dropped without a copy, too."""
REPLICAS = "data_parallel_size"
"""Engine option for replicas that share experts. The search decides the number."""
SEVERAL_NODES = (2, 4, 8)
"""Numbers of nodes of an engine, tried for a model without an engine inside a node. A run refuses such engines."""
SHARED_PHASES = ("generate", "logprobs", "train", "sync")
"""Phases to check on a shared GPU; no other phase needs more memory."""


@dataclass(frozen=True)
class EngineChoice:
    """Engines with a given division of the model, and all fitting memory fractions."""

    config: Config
    """The settings with these engines."""
    fractions: tuple[tuple[float, int, float], ...]
    """Memory fraction, KV cache tokens and seconds to generate; largest fraction first."""
    memory: EngineMemory
    """Memory of a worker. The parts used here are the same for every fraction."""

    def rollout(self, fraction: float) -> RolloutConfig:
        """Returns the rollout settings of these engines with `fraction`, from `fractions`, as `memory_fraction`."""
        return replace(self.config.rollout, memory_fraction=fraction)


@dataclass(frozen=True)
class EnginePlan:
    """Engines chosen for a policy, with `residency.keep` and the memory fraction."""

    engine: EngineChoice
    keep: list[str] | None
    """Value of `residency.keep`."""
    fraction: float
    """Value of `rollout.memory_fraction`."""
    tokens: int
    """KV cache tokens of a worker."""
    seconds: float
    """Seconds of a step spent on generation."""


class PolicyRanks:
    """Memory by phase of a policy rank of each pipeline stage, for any `residency.keep`.

    Args:
        config: The settings.
        decoder: The model.
        parallel: The policy's grid.
    """

    def __init__(self, config: Config, decoder: Decoder, parallel: ParallelDims) -> None:
        self.size, self.parallel = gpu_bytes(config), parallel
        ranks = [
            replace(policy_memory(config, decoder, parallel, r), keep=None) for r in stage_ranks(parallel).values()
        ]
        self._all = {phase: np.array([sum(r.phase(phase).values()) for r in ranks]) for phase in SHARED_PHASES}
        self._parts = {
            "parameters": np.array([r.state.weights for r in ranks]),
            "gradients": np.array([r.state.gradients for r in ranks]),
            "optimizer": np.array([r.state.optimizer for r in ranks]),
        }

    def peak_in(self, phase: str, keep: list[str] | None) -> int:
        """Returns the bytes on the GPU of the fullest policy rank in a phase of `SHARED_PHASES`, with `keep` as
        `residency.keep` (None keeps all parts)."""
        resident_parts = resident(phase, keep)
        offloaded = sum(self._parts[part] for part in POLICY if part not in resident_parts)
        return int((self._all[phase] - offloaded).max())

    def peak(self, keep: list[str] | None) -> int:
        """Returns the bytes on the GPU of the fullest policy rank in the fullest phase, with `keep` as
        `residency.keep`: the parts kept on the GPU in every phase; None keeps all parts."""
        return max(self.peak_in(phase, keep) for phase in SHARED_PHASES)


def engine_choices(config: Config, decoder: Decoder, workers: int) -> list[EngineChoice]:
    """Returns every division of `workers` GPUs into engines with enough memory for the model and the KV cache of a
    sequence of maximum length.

    If some divisions keep the policy's FP8 blocks whole, returns only these. Engines of several nodes are returned only
    if no engine fits inside a node. [] if no division fits. A policy on the same GPUs is not considered here, but in
    `fastest_engines`.

    Raises:
        UserError: The files of a draft model or head (`rollout.drafts`) cannot be used.
    """
    sizes = [(tensor, 1) for tensor in range(1, engine_cluster(config).gpus_per_node + 1)]
    choices = _placed(config, _choices(config, decoder, workers, sizes))
    if not choices:
        larger = (several_nodes(config, decoder, nodes, workers) for nodes in SEVERAL_NODES)
        choices = _placed(config, [choice for of_size in larger for choice in of_size])
    return [choice for choice in choices if engine_blocks.partial_block(choice.config, decoder) is None] or choices


def _placed(config: Config, choices: list[EngineChoice]) -> list[EngineChoice]:
    """Returns the engines with a place on the nodes of the settings."""
    if pool := config.cluster.pools.engines:
        return [choice for choice in choices if pool_nodes_needed(choice.config, pool) <= pool.nodes]
    return [choice for choice in choices if plan_placement(choice.config).nodes <= config.cluster.nodes]


def several_nodes(config: Config, decoder: Decoder, nodes: int, workers: int | None = None) -> list[EngineChoice]:
    """Returns the fitting engines of `nodes` whole nodes, with tensor parallelism over all GPUs first.

    Args:
        config: The settings.
        decoder: The model.
        nodes: Number of nodes of an engine.
        workers: GPUs of all engines, a multiple of the GPUs of `nodes` nodes, otherwise nothing fits; None for a single
            engine.

    Returns:
        The engines that can hold the model and a sequence of maximum length; [] if none can.

    Raises:
        UserError: The files of a draft model or head (`rollout.drafts`) cannot be used.
    """
    node = engine_cluster(config).gpus_per_node
    return _choices(config, decoder, workers or nodes * node, [(nodes * node, 1), (node, nodes)])


def _choices(config: Config, decoder: Decoder, workers: int, sizes: Iterable[tuple[int, int]]) -> list[EngineChoice]:
    """Returns the fitting engines over `workers` GPUs, for sizes given as tensor parallelism and data-parallel replicas
    that share experts."""
    choices = []
    for tensor, data in sizes:
        if workers % (tensor * data):
            continue
        for options in _expert_options(config, decoder, tensor, data):
            all_options = {**_without_replicas(config.rollout.options), **options}
            rollout = replace(config.rollout, tensor=tensor, engines=workers // (tensor * data), options=all_options)
            if choice := _engine_choice(replace(config, rollout=rollout), decoder):
                choices.append(choice)
    return choices


def _without_replicas(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rollout.options` with one replica in place of the given number."""
    return {name: 1 if name == REPLICAS else value for name, value in options.items()}


def _expert_options(config: Config, decoder: Decoder, tensor: int, data: int) -> list[dict[str, Any]]:
    """Returns the candidates for engine options: columns of experts or whole experts on a worker; replicas have whole
    experts, and none without experts."""
    if data > 1:
        return [{"enable_expert_parallel": True, REPLICAS: data}] if decoder.experts else []
    if tensor == 1 or not decoder.experts or expert_parallel(config.rollout):
        return [{}]
    return [{}, {"enable_expert_parallel": True}]


def _engine_choice(config: Config, decoder: Decoder) -> EngineChoice | None:
    """Returns the engines with all fractions that leave room for the model and a sequence; None if no fraction does."""
    cut = EngineCut.of(config.rollout)
    try:
        check(decoder, cut)
        if fp8_parameters(config.rollout):
            check_blocks(decoder, cut)
    except UserError:
        return None
    step, is_shared = batch(config, ParallelDims()), config.cluster.shared
    choices = []
    for fraction in sorted({config.rollout.memory_fraction, *FRACTIONS[is_shared]}, reverse=True):
        settings = replace(config, rollout=replace(config.rollout, memory_fraction=fraction))
        memory = engine_memory(settings, decoder)
        if memory.starts() and (is_shared or memory.peak <= gpu_bytes(engine_view(config))):
            choices.append((fraction, memory.tokens, generate_time(settings, decoder, step)))
    return EngineChoice(config, tuple(choices), engine_memory(config, decoder)) if choices else None


def fastest_engines(config: Config, ranks: PolicyRanks, candidates: list[EngineChoice]) -> Iterator[EnginePlan]:
    """Yields, for each value of `residency.keep` to try, the fastest engines that fit beside the policy on shared GPUs.
    On separate GPUs, yields the fastest engines once, with the given `residency.keep`. Yields nothing if nothing fits.

    Args:
        config: The settings.
        ranks: Memory of the policy.
        candidates: Result of `engine_choices`, not empty.
    """
    given = config.residency.keep
    if not config.cluster.shared:
        # On separate GPUs only the policy must fit, and the fastest engines are best.
        if ranks.peak(given) <= ranks.size:
            yield min(
                (EnginePlan(engine, given, *choice) for engine in candidates for choice in engine.fractions),
                key=lambda plan: plan.seconds,
            )
        return
    for keep in _keep_choices(config):
        policy = {phase: ranks.peak_in(phase, keep) for phase in SHARED_PHASES}
        plans = (_with_largest_fraction(engine, keep, policy, ranks.size) for engine in candidates)
        if fastest := min(filter(None, plans), key=lambda plan: plan.seconds, default=None):
            yield fastest


def _keep_choices(config: Config) -> list[list[str] | None]:
    """Returns the candidates for `residency.keep`, and the given value. The critic always stays, as it uses separate
    GPUs."""
    given = config.residency.keep
    choices = [None if keep is None else [*keep, *CRITIC[: has_critic(config)]] for keep in KEEPS]
    choices = choices if given in choices else [*choices, given]
    # A streamed optimizer is never resident (`config/checks/devices.py`).
    return [keep for keep in choices if not (config.policy.optimizer.streamed and "optimizer" in (keep or ()))]


def _with_largest_fraction(
    engine: EngineChoice, keep: list[str] | None, policy: dict[str, int], size: int
) -> EnginePlan | None:
    """Returns the engines with the largest fraction fitting beside the policy in every phase; None if no fraction
    fits."""
    phases = list(_bytes_by_phase(engine, keep, policy))
    if any(used > size for has_cache, used in phases if not has_cache):
        return None
    budget = size - max((used for has_cache, used in phases if has_cache), default=0)
    fitting = (choice for choice in engine.fractions if int(choice[0] * size) <= budget)
    return next((EnginePlan(engine, keep, *choice) for choice in fitting), None)


def _bytes_by_phase(engine: EngineChoice, keep: list[str] | None, policy: dict[str, int]) -> Iterator[tuple[bool, int]]:
    """Yields for each phase: True if the KV cache is present, and the bytes of policy and engine.

    While the KV cache is present, the engine's budget is not included in the bytes.
    """
    for phase, used in policy.items():
        resident_parts = resident(phase, keep)
        used += engine.memory.staged * (phase == "sync") + engine.memory.beside
        has_cache = "kv_cache" in resident_parts
        asleep = engine.memory.reserve + engine.memory.weights * ("engine_weights" in resident_parts)
        yield has_cache, used + asleep * (not has_cache)


def missing_bytes(config: Config, ranks: PolicyRanks, candidates: list[EngineChoice]) -> int:
    """Returns the bytes missing on the fullest GPU, with the engines and the `residency.keep` of least memory; 0 or
    less if these fit. On separate GPUs only the policy counts, with the given `residency.keep`.

    Args:
        config: The settings.
        ranks: Memory of the policy.
        candidates: Result of `engine_choices`, not empty.
    """
    if not config.cluster.shared:
        return ranks.peak(config.residency.keep) - ranks.size
    shortages = []
    for keep in _keep_choices(config):
        policy = {phase: ranks.peak_in(phase, keep) for phase in SHARED_PHASES}
        for engine in candidates:
            share, phases = int(engine.fractions[-1][0] * ranks.size), _bytes_by_phase(engine, keep, policy)
            shortages.append(max(used + share * has_cache for has_cache, used in phases))
    return min(shortages) - ranks.size
