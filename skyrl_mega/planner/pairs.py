"""Which engines fit beside a policy, and how fast they generate: the inner part of a search of layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from skyrl_mega.cluster.place import place
from skyrl_mega.config.derived import expert_parallel, fp8_parameters, length_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.residency import CRITIC, POLICY, resident
from skyrl_mega.config.schema import Config, RolloutConfig
from skyrl_mega.models import engine
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import engine_blocks
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import engine_memory, gpu_bytes, policy_memory
from skyrl_mega.planner.processes import EngineMemory
from skyrl_mega.planner.shared import stages
from skyrl_mega.planner.times import generate_time

FRACTIONS = {False: (0.9,), True: tuple(round(0.05 * k, 2) for k in range(2, 19))}
"""By whether GPUs are shared, what is tried for `rollout.memory_fraction` beside the setting itself."""
KEEPS: tuple[tuple[str, ...] | None, ...] = (
    None,
    ("parameters", "gradients", "optimizer"),
    ("parameters", "optimizer"),
    ("parameters",),
    ("optimizer",),
    (),
)
"""What is tried for `residency.keep` on shared GPUs. Engines that sleep copy nothing, so no other choice has them stay;
nor do gradients copy anything."""
SHARED_PHASES = ("generate", "logprobs", "train", "sync")
"""In the others a shared GPU has no more than in these."""


@dataclass(frozen=True)
class Engine:
    """Engines of one cut, with every share of the memory that is tried."""

    config: Config
    choices: tuple[tuple[float, int, float], ...]
    """Share, tokens of the cache, seconds to generate; the largest share first."""
    memory: EngineMemory
    """Of a worker, with any share."""

    def rollout(self, fraction: float) -> RolloutConfig:
        """Its settings with a share."""
        return replace(self.config.rollout, memory_fraction=fraction)


@dataclass(frozen=True)
class Pair:
    """An engine beside a policy."""

    engine: Engine
    keep: list[str] | None
    fraction: float
    tokens: int
    """KV cache of one worker."""
    seconds: float
    """To generate."""


class Ranks:
    """The policy's ranks, one of each pipeline stage: bytes by phase for any choice of what stays."""

    def __init__(self, config: Config, d: Decoder, parallel: ParallelDims) -> None:
        self.size = gpu_bytes(config)
        ranks = [replace(policy_memory(config, d, parallel, r), keep=None) for r in stages(parallel).values()]
        self._all = {phase: np.array([sum(r.phase(phase).values()) for r in ranks]) for phase in SHARED_PHASES}
        self._parts = {
            "parameters": np.array([r.held.weights for r in ranks]),
            "gradients": np.array([r.held.gradients for r in ranks]),
            "optimizer": np.array([r.held.optimizer for r in ranks]),
        }

    def most(self, phase: str, keep: list[str] | None) -> int:
        """Bytes of the fullest rank in a phase."""
        here = resident(phase, keep)
        away = sum(self._parts[part] for part in POLICY if part not in here)
        return int((self._all[phase] - away).max())

    def peak(self, keep: list[str] | None) -> int:
        """Of all phases."""
        return max(self.most(phase, keep) for phase in SHARED_PHASES)


def engines(config: Config, d: Decoder, workers: int) -> list[Engine]:
    """Every cut of engines over so many GPUs that can hold the model and a sequence; where some have the policy's
    blocks of FP8, only these."""
    rollout = config.rollout
    dealt = [{}, {"enable_expert_parallel": True}] if d.experts and not expert_parallel(rollout) else [{}]
    found = []
    for tensor in (n for n in range(1, config.cluster.gpus_per_node + 1) if workers % n == 0):
        for options in dealt if tensor > 1 else [{}]:
            cut = replace(rollout, tensor=tensor, engines=workers // tensor, options={**rollout.options, **options})
            made = _engine(replace(config, rollout=cut), d)
            if made and place(made.config).nodes <= config.cluster.nodes:
                found.append(made)
    return [made for made in found if engine_blocks.other(made.config, d) is None] or found


def _engine(config: Config, d: Decoder) -> Engine | None:
    """With every share that holds the model and a sequence; None where there is none."""
    cut = config.rollout.tensor, expert_parallel(config.rollout)
    try:
        engine.check(d, *cut)
        if fp8_parameters(config.rollout):
            engine.check_blocks(d, *cut)
    except UserError:
        return None
    made, shared = batch(config, ParallelDims()), config.cluster.shared
    choices = []
    for fraction in sorted({config.rollout.memory_fraction, *FRACTIONS[shared]}, reverse=True):
        given = replace(config, rollout=replace(config.rollout, memory_fraction=fraction))
        memory = engine_memory(given, d)
        if memory.tokens >= length_limit(config.rollout) and (shared or memory.peak <= gpu_bytes(config)):
            choices.append((fraction, memory.tokens, generate_time(given, d, made)))
    return Engine(config, tuple(choices), engine_memory(config, d)) if choices else None


def pairs(config: Config, ranks: Ranks, chosen: list[Engine]) -> Iterator[Pair]:
    """For each choice of what stays in memory, the engines that generate fastest of those that fit."""
    own = config.residency.keep
    if not config.cluster.shared:
        # On GPUs of their own only the policy must fit, and the fastest engines are the best.
        if ranks.peak(own) <= ranks.size:
            yield min((Pair(e, own, *choice) for e in chosen for choice in e.choices), key=lambda pair: pair.seconds)
        return
    for keep in _keeps(config):
        policy = {phase: ranks.most(phase, keep) for phase in SHARED_PHASES}
        fits = (pair for e in chosen if (pair := _largest(e, keep, policy, ranks.size)))
        if best := min(fits, key=lambda pair: pair.seconds, default=None):
            yield best


def _keeps(config: Config) -> list[list[str] | None]:
    """The choices, and the setting itself. A critic has GPUs of its own: there nothing needs to make room."""
    own = config.residency.keep
    tried = [
        None if keep is None else [*keep, *CRITIC] if config.algorithm.advantage == "gae" else [*keep] for keep in KEEPS
    ]
    tried = tried if own in tried else [*tried, own]
    # A streamed optimizer stays nowhere (`config/residency_checks.py`).
    return [keep for keep in tried if not (config.policy.optimizer.streamed and "optimizer" in (keep or ()))]


def _largest(e: Engine, keep: list[str] | None, policy: dict[str, int], size: int) -> Pair | None:
    """With the largest share that fits beside the policy in every phase."""
    room = size
    for in_cache, taken in _beside(e, keep, policy):
        if in_cache:
            room = min(room, size - taken)
        elif taken > size:
            return None
    for fraction, tokens, seconds in e.choices:
        if int(fraction * size) <= room:
            return Pair(e, keep, fraction, tokens, seconds)
    return None


def _beside(e: Engine, keep: list[str] | None, policy: dict[str, int]) -> Iterator[tuple[bool, int]]:
    """Phase by phase, whether an engine has its cache, and the bytes of both; with it, without the engine's share."""
    for phase, taken in policy.items():
        here = resident(phase, keep)
        taken += e.memory.staged * (phase == "sync") + e.memory.beside
        in_cache = "kv_cache" in here
        asleep = e.memory.reserve + e.memory.weights * ("engine_weights" in here)
        yield in_cache, taken + asleep * (not in_cache)


def lacking(config: Config, ranks: Ranks, chosen: list[Engine]) -> int:
    """Bytes that a GPU lacks with the engines and the choice of what stays that need least; 0 or less where all fit."""
    if not config.cluster.shared:
        return ranks.peak(config.residency.keep) - ranks.size
    found = []
    for keep in _keeps(config):
        policy = {phase: ranks.most(phase, keep) for phase in SHARED_PHASES}
        for e in chosen:
            share = int(e.choices[-1][0] * ranks.size)
            found.append(max(taken + share * in_cache for in_cache, taken in _beside(e, keep, policy)))
    return min(found) - ranks.size
