"""Bytes of every process by kind: policy ranks, ranks of a reference of its own, engine workers.

Weights, gradients, optimizer state and buckets of the sync are counted from the tensors' shapes. Activations, logits,
an engine's working memory and the reserve are estimated: `MARGIN` says how far off they may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from skyrl_mega.config.derived import engine_data, engine_ranks, expert_parallel, length_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.layout.parallel import Coordinates, Parallel
from skyrl_mega.models import engine
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.sizing.activations import Activations, activations
from skyrl_mega.sizing.batch import batch
from skyrl_mega.sizing.buffers import Held, held
from skyrl_mega.sizing.parameters import Parameters, stage

GIB = 2**30
MARGIN = 0.25
"""An estimated kind may be larger or smaller by this share."""
BUCKETS = 3
"""Buckets of the weight sync in one process at most."""
GRAPHS = 1 * GIB
"""What CUDA graphs of an engine take; nothing where it is eager."""
PREFILL = 8192
"""Tokens of one engine step at most, or the longest sequence (`rollout.engine`)."""
DEFAULT_GPU_GIB = 80.0


@dataclass(frozen=True)
class PolicyMemory:
    """One policy rank. Bytes."""

    held: Held
    """Counted."""
    at: Activations
    """Estimated."""
    reference: int
    """The reference's weights, which come from host memory for its log-probs. Counted."""
    sync: int
    """Buckets. Counted."""
    reserve: int
    """Estimated."""

    @property
    def phases(self) -> dict[str, tuple[int, int]]:
        """By phase, the counted and the estimated bytes that exist only in it."""
        return {
            "train": (0, self.at.train + self.at.train_logits),
            "log-probs": (self.reference, self.at.forward + self.at.forward_logits),
            "sync": (self.sync, 0),
        }

    @property
    def busiest(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda name: sum(self.phases[name]))

    @property
    def peak(self) -> int:
        """Bytes in the phase that takes most."""
        return self.held.total + self.reserve + sum(self.phases[self.busiest])

    @property
    def least(self) -> int:
        """The peak when every estimate is too high by the margin."""
        transient = max(counted + (1 - MARGIN) * guess for counted, guess in self.phases.values())
        return int(self.held.total + (1 - MARGIN) * self.reserve + transient)


@dataclass(frozen=True)
class EngineMemory:
    """One engine worker. Bytes."""

    weights: int
    """Counted, as vLLM holds them at load time."""
    working: int
    """Activations, logits and sampling of the largest step. Estimated."""
    sync: int
    """Counted."""
    reserve: int
    """Estimated."""
    budget: int
    """What it may take in all (`rollout.memory_fraction`), or on a CPU the KV cache that was asked for and the rest."""
    per_token: int
    """KV cache of one token."""
    given: int | None = None
    """KV cache on a CPU."""

    @property
    def kv(self) -> int:
        """KV cache: what is left of the budget."""
        if self.given is not None:
            return self.given
        return self.budget - self.weights - self.working - self.reserve

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return max(0, self.kv) // self.per_token

    @property
    def most_tokens(self) -> int:
        """Tokens when every estimate is too high by the margin."""
        return max(0, self.kv + int(MARGIN * (self.working + self.reserve))) // self.per_token

    @property
    def peak(self) -> int:
        """Its whole budget, and the buckets."""
        return self.budget + self.sync


def itemsize(config: Config) -> int:
    """Bytes of a parameter."""
    return 4 if config.model.dtype == "float32" else 2


def gpu_bytes(config: Config) -> int:
    """Memory of one GPU."""
    return int((config.cluster.gpu_memory_gib or DEFAULT_GPU_GIB) * GIB)


def on_cpu(config: Config) -> bool:
    """Whether processes compute in host memory; `auto` is planned as CUDA."""
    return config.cluster.device == "cpu"


def policy_memory(config: Config, d: Decoder, parallel: Parallel, rank: int) -> PolicyMemory:
    """What policy rank `rank` needs."""
    at, size = parallel.coordinates(rank), itemsize(config)
    chunks = stage(d, parallel, at.pp)
    counted = _held(d, parallel, at, size, config.policy.moe.freeze_router)
    copied = bool(config.algorithm.kl.coefficient) and config.reference.layout is None
    return PolicyMemory(
        held=counted,
        at=_activations(config, d, parallel, at.pp),
        reference=_plain(chunks) * size if copied else 0,
        sync=int(BUCKETS * config.weights.bucket_mib * 2**20),
        reserve=0 if on_cpu(config) else int(config.cluster.gpu_reserve_gib * GIB),
    )


def reference_memory(config: Config, d: Decoder, parallel: Parallel, rank: int) -> PolicyMemory:
    """What rank `rank` of a reference with a layout of its own needs: weights, and log-probs."""
    at = parallel.coordinates(rank)
    forward = replace(_activations(config, d, parallel, at.pp), train=0, train_logits=0)
    weights = _plain(stage(d, parallel, at.pp)) * itemsize(config)
    reserve = 0 if on_cpu(config) else int(config.cluster.gpu_reserve_gib * GIB)
    return PolicyMemory(Held(weights, 0, 0), forward, 0, 0, reserve)


def engine_memory(config: Config, d: Decoder, worker: int = 0) -> EngineMemory:
    """What worker `worker` of an engine needs."""
    rollout, size = config.rollout, itemsize(config)
    data = engine_data(rollout)
    weights = size * engine_parameters(d, rollout.tensor, data, expert_parallel(rollout), worker)
    tensor = rollout.tensor
    prefill = max(length_limit(rollout), PREFILL)
    width = (d.heads + 2 * d.kv_heads) * d.head_dim / tensor + 4 * d.hidden
    if d.experts:
        # The fused MoE kernel's two work spaces.
        inner = d.experts.width if expert_parallel(rollout) else d.experts.width / engine_ranks(rollout)
        width += d.experts.per_token * (max(2 * inner, d.hidden) + max(inner, d.hidden))
    else:
        width += 3 * d.ffn / tensor
    # Logits, in float32 too, and what sampling sorts: values and indices.
    working = prefill * width * size + rollout.concurrency * d.vocab * (size + 4 + 4 + 8 + 4)
    per_token = 2 * d.layers * max(1, d.kv_heads // tensor) * d.head_dim * size
    sync = int(BUCKETS * config.weights.bucket_mib * 2**20)
    if on_cpu(config):
        kv = int(rollout.kv_cache_gib * GIB)
        return EngineMemory(weights, int(working), sync, 0, weights + int(working) + kv, per_token, kv)
    reserve = int(config.cluster.gpu_reserve_gib * GIB / 2) + (0 if rollout.eager else GRAPHS)
    budget = int(rollout.memory_fraction * gpu_bytes(config))
    return EngineMemory(weights, int(working), sync, reserve, budget, per_token)


@lru_cache(maxsize=256)
def engine_parameters(d: Decoder, tensor: int, data: int, experts_dealt: bool, worker: int) -> int:
    """Elements of an engine worker's parameters, from the boxes in `models.engine`."""
    total = 0
    for moe in (False, True):
        count = sum(d.is_moe(i) == moe for i in range(d.layers))
        if count:
            experts = replace(d.experts, layers=frozenset({0})) if d.experts and moe else None
            params = engine.shard(replace(d, layers=1, experts=experts), tensor, worker, experts_dealt, data).params
            of_layer = sum(prod(shape) for name, shape in params.items() if ".layers." in name)
            total += count * of_layer
    return total + sum(prod(shape) for name, shape in params.items() if ".layers." not in name)


def _activations(config: Config, d: Decoder, parallel: Parallel, pp: int) -> Activations:
    return activations(
        d,
        parallel,
        pp,
        batch(config, parallel).row,
        itemsize(config),
        recompute=config.policy.recompute,
        logit_chunk=config.policy.logit_chunk,
    )


@lru_cache(maxsize=4096)
def _held(d: Decoder, parallel: Parallel, at: Coordinates, size: int, freeze_router: bool) -> Held:
    return held(stage(d, parallel, at.pp), parallel, at, size, freeze_router)


def _plain(chunks: Sequence[Parameters]) -> int:
    """Elements without buffers around them."""
    return sum(chunk.total for chunk in chunks)
