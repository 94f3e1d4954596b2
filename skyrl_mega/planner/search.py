"""Layouts for a number of GPUs: all that fit, the fastest by the estimated step time first.

Policy and engines are searched apart and put together: their times add up, and only GPUs that they share bind them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from skyrl_mega.cluster.place import place
from skyrl_mega.config.derived import has_critic, length_limit, reference_ranks
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.models import engine, megatron
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.fit import stages
from skyrl_mega.planner.memory import critic_dims, critic_memory, engine_memory, gpu_bytes, on_cpu, policy_memory
from skyrl_mega.planner.times import generate_time, step_time

SECONDS = 8.0
"""Processor time of a search at most."""
MICRO_TOKENS = (4096, 8192, 16384, 32768, 65536)
CONTEXT = (1, 2, 4, 8)
LONG = 16384
"""Tokens of a sequence from which context parallelism is worth trying."""
EIGHTHS = range(1, 8)
"""Shares of the GPUs that the policy may have beside the engines."""
FRACTIONS = {False: (0.9,), True: (0.3, 0.4, 0.5, 0.6, 0.7)}
"""By whether GPUs are shared, what is tried for `rollout.memory_fraction` beside the setting itself."""
MORE = (5, 6, 8, 12, 16, 24, 32)
"""Quarters of the GPUs that are tried where nothing fits them."""


@dataclass(frozen=True)
class Suggestion:
    """Settings that fit."""

    parallel: ParallelDims
    config: Config
    """The settings with everything in place."""
    peak: int
    """Bytes of the fullest policy rank."""
    kv_tokens: int
    """KV cache of one engine worker."""
    seconds: float
    """Of an RL step, estimated."""

    @property
    def settings(self) -> dict[str, Any]:
        """What makes these settings of the given ones, by dotted key."""
        c, layout = self.config, self.config.policy.layout
        return {
            "cluster.nodes": c.cluster.nodes,
            "policy.ranks": c.policy.ranks,
            **{f"policy.layout.{name}": getattr(layout, name) for name in vars(LayoutConfig())},
            "policy.micro_tokens": c.policy.micro_tokens,
            "policy.recompute": c.policy.recompute,
            "rollout.engines": c.rollout.engines,
            "rollout.tensor": c.rollout.tensor,
            "rollout.memory_fraction": c.rollout.memory_fraction,
        }

    @property
    def overrides(self) -> list[str]:
        """These as arguments of the command."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]

    @property
    def order(self) -> tuple[float, ...]:
        """The fastest first; of those that take the same time, the one that cuts the model least."""
        p = self.parallel
        return (
            round(self.seconds, 1),
            p.pipeline * p.virtual_pipeline,
            p.tensor * p.context,
            p.expert,
            self.config.policy.recompute != "none",
        )


@dataclass(frozen=True)
class Search:
    """What came of it."""

    gpus: int
    tried: int
    """Settings that were computed."""
    found: tuple[Suggestion, ...]
    """One for each layout, the fastest first."""
    complete: bool
    """Whether the time was enough for all of them."""
    enough: int | None = None
    """Where nothing was found, more GPUs that something fits."""


def search(config: Config, hf: Mapping[str, Any], gpus: int | None = None) -> Search:
    """Tries layouts for `gpus` GPUs (None: those of the settings).

    Raises:
        UserError: the number is none that nodes of this size make, it is a run on a CPU, or the critic's own layout is
            none of its ranks or of the model.
    """
    if on_cpu(config):
        raise UserError("--suggest: cluster.device = cpu; layouts are suggested for GPUs: add cluster.device=cuda")
    node = config.cluster.gpus_per_node
    gpus = config.cluster.nodes * node if gpus is None else gpus
    if gpus < 1 or (gpus > node and gpus % node):
        low = max(1, gpus // node) * node
        raise UserError(
            f"--suggest {gpus}: nodes have {node} GPUs (cluster.gpus_per_node); nearest that work: {low}, {low + node}"
        )
    d = architecture(hf).describe(hf)
    if config.critic.layout and config.critic.ranks:
        _critic(config, d)  # nothing of it is searched
    end = time.process_time() + SECONDS
    tried, best = 0, dict[ParallelDims, Suggestion]()
    for made in _tries(config, d, gpus, end):
        tried += 1
        if made and (made.parallel not in best or made.seconds < best[made.parallel].seconds):
            best[made.parallel] = made
    complete = time.process_time() < end
    larger = [-(-gpus * quarters // (4 * node)) * node for quarters in MORE] if not best else []
    enough = next((n for n in larger if any(_tries(config, d, n, end))), None)
    return Search(gpus, tried, tuple(sorted(best.values(), key=lambda s: s.order)), complete, enough)


def _tries(config: Config, d: Decoder, gpus: int, end: float) -> Iterator[Suggestion | None]:
    """Everything that is tried, until the time is up; None for what does not fit."""
    config = replace(config, cluster=replace(config.cluster, nodes=-(-gpus // config.cluster.gpus_per_node)))
    fixed = reference_ranks(config) + (config.critic.ranks or 0) * has_critic(config)
    for ranks, workers in _splits(config, gpus - fixed):
        engines = sorted(_engines(config, d, workers), key=lambda made: made[0])
        # On GPUs of their own the fastest engines are the best; on shared ones they must leave room for the policy.
        for _, chosen in engines if config.cluster.shared else engines[:1]:
            made = replace(config, rollout=chosen.rollout, policy=replace(config.policy, ranks=ranks))
            if place(made).nodes > made.cluster.nodes:
                continue
            for parallel, layout in _layouts(config, d, ranks):
                for made in _policies(replace(config, rollout=chosen.rollout), ranks, layout):
                    if time.process_time() > end:
                        return
                    yield _measure(made, d, parallel)


def _measure(config: Config, d: Decoder, parallel: ParallelDims) -> Suggestion | None:
    """The settings with their figures, where they fit."""
    room = gpu_bytes(config)
    worker = engine_memory(config, d)
    peak = 0
    for rank in stages(parallel).values():
        peak = max(peak, policy_memory(config, d, parallel, rank).peak)
        if peak + (worker.resident if config.cluster.shared else 0) > room:
            return None
    try:
        critic = _critic(config, d)
    except UserError:
        return None
    if critic and any(critic_memory(config, d, critic, rank).peak > room for rank in stages(critic).values()):
        return None
    return Suggestion(parallel, config, peak, worker.tokens, step_time(config, d, parallel).step)


def _critic(config: Config, d: Decoder) -> ParallelDims | None:
    """The critic's grid; None without one.

    Raises:
        UserError: Its layout, or the policy's in place of it, is none of its ranks or of the model.
    """
    critic = critic_dims(config)
    if critic:
        megatron.check(d, critic, "critic.layout")
    return critic


def _splits(config: Config, gpus: int) -> list[tuple[int, int]]:
    """GPUs of the policy and of the engines: whole nodes, or within one node any even share. A critic without ranks of
    its own has as many as the policy."""
    trained = 2 if has_critic(config) and config.critic.ranks is None else 1
    if config.cluster.shared:
        return [(gpus // trained, gpus // trained)]
    unit = config.cluster.gpus_per_node if gpus > config.cluster.gpus_per_node else 1
    shares = sorted({round(gpus / unit * k / 8) * unit for k in EIGHTHS})
    return [(ranks, gpus - trained * ranks) for ranks in shares if ranks > 0 and trained * ranks < gpus]


def _engines(config: Config, d: Decoder, workers: int) -> Iterator[tuple[float, Config]]:
    """Engines on so many GPUs that hold the model and a sequence, with their time."""
    for tensor in _divisors(workers):
        if tensor > config.cluster.gpus_per_node:
            break
        try:
            engine.check(d, tensor)
        except UserError:
            continue
        for fraction in (config.rollout.memory_fraction, *FRACTIONS[config.cluster.shared]):
            rollout = replace(config.rollout, tensor=tensor, engines=workers // tensor, memory_fraction=fraction)
            made = replace(config, rollout=rollout)
            if engine_memory(made, d).tokens >= length_limit(rollout):
                yield generate_time(made, d, batch(made, ParallelDims())), made


def _layouts(config: Config, d: Decoder, ranks: int) -> Iterator[tuple[ParallelDims, LayoutConfig]]:
    """Every layout of the model over so many ranks, tensor parallel within a node."""
    sizes = _divisors(ranks)
    tensors = [n for n in sizes if n <= config.cluster.gpus_per_node]
    contexts = [n for n in CONTEXT if n == 1 or length_limit(config.rollout) >= LONG]
    experts = [n for n in sizes if d.experts and d.experts.count % n == 0] or [1]
    for tensor, pipeline, virtual, context, expert in product(tensors, sizes, (1, 2), contexts, experts):
        ends = _ends(d.layers, pipeline, virtual)
        if ends is None or ranks % (tensor * pipeline * context) or ranks % (pipeline * expert):
            continue
        layout = LayoutConfig(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            context=context,
            expert=expert,
            first_stage_layers=ends or None,
            last_stage_layers=ends or None,
        )
        try:
            parallel = ParallelDims.from_config(layout, ranks)
            megatron.check(d, parallel)
        except UserError:
            continue
        yield parallel, layout


def _ends(layers: int, pipeline: int, virtual: int) -> int | None:
    """Layers of the first and of the last stage where they have fewer than the others; 0 where all have as many.

    None where the model cannot be cut so.
    """
    if pipeline == 1:
        return 0 if virtual == 1 else None
    if layers % (pipeline * virtual) == 0:
        return 0
    between = -(-layers // pipeline)
    left = layers - between * (pipeline - 2)
    return left // 2 if virtual == 1 and left > 0 and left % 2 == 0 else None


def _policies(config: Config, ranks: int, layout: LayoutConfig) -> Iterator[Config]:
    """The layout with micro-batches of different sizes, with and without recomputation."""
    for tokens, recompute in product(sorted({*MICRO_TOKENS, config.policy.micro_tokens}), ("none", "full")):
        policy = replace(config.policy, ranks=ranks, layout=layout, micro_tokens=tokens, recompute=recompute)
        yield replace(config, policy=policy)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
