"""Combines engines with a policy: which engines fit, and how fast they generate. The inner part of the layout
search."""

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
SHARED_PHASES = ("generate", "logprobs", "train", "sync")
"""Phases to check on a shared GPU; no other phase needs more memory."""


@dataclass(frozen=True)
class Engine:
    """Engines of a given cut, with all fitting memory fractions."""

    config: Config
    choices: tuple[tuple[float, int, float], ...]
    """Memory fraction, KV cache tokens and seconds to generate; largest fraction first."""
    memory: EngineMemory
    """Memory of a worker. The parts used here are the same for every fraction."""

    def rollout(self, fraction: float) -> RolloutConfig:
        """Returns the rollout settings with a memory fraction."""
        return replace(self.config.rollout, memory_fraction=fraction)


@dataclass(frozen=True)
class Pair:
    """Engines combined with a policy."""

    engine: Engine
    keep: list[str] | None
    fraction: float
    tokens: int
    """KV cache tokens of a worker."""
    seconds: float
    """Seconds to generate."""


class Ranks:
    """Memory by phase of a policy rank of each pipeline stage, for any `residency.keep`."""

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
        """Returns the bytes of the fullest rank in a phase."""
        here = resident(phase, keep)
        away = sum(self._parts[part] for part in POLICY if part not in here)
        return int((self._all[phase] - away).max())

    def peak(self, keep: list[str] | None) -> int:
        """Returns the bytes of the fullest rank over all phases."""
        return max(self.most(phase, keep) for phase in SHARED_PHASES)


def engines(config: Config, d: Decoder, workers: int) -> list[Engine]:
    """Returns every cut of engines over `workers` GPUs that leaves room for the model and a sequence.

    If some of these cuts use the policy's FP8 blocks, returns only them.
    """
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
    """Returns the engines with all fractions that leave room for the model and a sequence; None if no fraction does."""
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
    """Yields, for each choice of `residency.keep`, the fastest fitting engines."""
    own = config.residency.keep
    if not config.cluster.shared:
        # On separate GPUs only the policy must fit, and the fastest engines are best.
        if ranks.peak(own) <= ranks.size:
            yield min((Pair(e, own, *choice) for e in chosen for choice in e.choices), key=lambda pair: pair.seconds)
        return
    for keep in _keeps(config):
        policy = {phase: ranks.most(phase, keep) for phase in SHARED_PHASES}
        fits = (pair for e in chosen if (pair := _largest(e, keep, policy, ranks.size)))
        if best := min(fits, key=lambda pair: pair.seconds, default=None):
            yield best


def _keeps(config: Config) -> list[list[str] | None]:
    """Returns the candidates for `residency.keep`, and the given value. The critic always stays, as it uses separate
    GPUs."""
    own = config.residency.keep
    tried = [
        None if keep is None else [*keep, *CRITIC] if config.algorithm.advantage == "gae" else [*keep] for keep in KEEPS
    ]
    tried = tried if own in tried else [*tried, own]
    # A streamed optimizer is never resident (`config/residency_checks.py`).
    return [keep for keep in tried if not (config.policy.optimizer.streamed and "optimizer" in (keep or ()))]


def _largest(e: Engine, keep: list[str] | None, policy: dict[str, int], size: int) -> Pair | None:
    """Returns the engines with the largest fraction fitting beside the policy in every phase; None if no fraction
    fits."""
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
    """Yields for each phase: True if the KV cache is present, and the bytes of policy and engine.

    While the KV cache is present, the engine's budget is not included in the bytes.
    """
    for phase, taken in policy.items():
        here = resident(phase, keep)
        taken += e.memory.staged * (phase == "sync") + e.memory.beside
        in_cache = "kv_cache" in here
        asleep = e.memory.reserve + e.memory.weights * ("engine_weights" in here)
        yield in_cache, taken + asleep * (not in_cache)


def lacking(config: Config, ranks: Ranks, chosen: list[Engine]) -> int:
    """Returns how many bytes of a GPU are missing with the least demanding engines and `residency.keep`; 0 or less if
    these fit."""
    if not config.cluster.shared:
        return ranks.peak(config.residency.keep) - ranks.size
    found = []
    for keep in _keeps(config):
        policy = {phase: ranks.most(phase, keep) for phase in SHARED_PHASES}
        for e in chosen:
            share = int(e.choices[-1][0] * ranks.size)
            found.append(max(taken + share * in_cache for in_cache, taken in _beside(e, keep, policy)))
    return min(found) - ranks.size
