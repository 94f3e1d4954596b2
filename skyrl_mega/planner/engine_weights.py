"""What an engine worker holds of the model: weights in the model's type or in block FP8, and the cache of one token.

Engines that serve FP8 (`rollout.options.quantization`, `hf_overrides.quantization_config`; docs/weight-sync.md) have a
byte for each element of a linear layer and a float32 scale for each block of 128 × 128. Embedding, head, routers and
norms stay in `model.dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from skyrl_mega.config import limits
from skyrl_mega.config.derived import engine_data, expert_parallel, fp8_parameters, fp8_weights, small_cache
from skyrl_mega.config.schema import Config
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.models import engine
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.fp8.format import quantised

SCALE = 4
"""Bytes of a block's scale."""


@dataclass(frozen=True)
class Elements:
    """Of a worker's parameters."""

    plain: int = 0
    """Of what is never quantised."""
    linear: int = 0
    """Of what is in FP8 where an engine serves that."""
    blocks: int = 0
    """Of 128 × 128 in those."""

    @property
    def all(self) -> int:
        """Plain and linear ones."""
        return self.plain + self.linear

    def bytes(self, itemsize: int, fp8: bool) -> int:
        """In the model's type, and where an engine serves FP8 in that."""
        return self.plain * itemsize + (self.linear + self.blocks * SCALE if fp8 else self.linear * itemsize)

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.plain + other.plain, self.linear + other.linear, self.blocks + other.blocks)

    def __mul__(self, times: int) -> Elements:
        return Elements(self.plain * times, self.linear * times, self.blocks * times)


def engine_bytes(config: Config, d: Decoder, worker: int = 0) -> int:
    """Bytes of an engine worker's weights."""
    return _of(config, d, worker).bytes(limits.itemsize(config.model.dtype), fp8_weights(config.rollout))


def staged_bytes(config: Config, d: Decoder) -> int:
    """Bytes of the layer that a sync writes before vLLM quantises it once more; 0 where it quantises nothing."""
    rollout = config.rollout
    if not fp8_weights(rollout) or fp8_parameters(rollout):
        return 0
    cut = (rollout.tensor, 0, expert_parallel(rollout), engine_data(rollout))
    layers = (_elements(engine.shard(d.of_one_layer(kind), *cut), layers=True) for kind in d.kinds)
    return max(layer.linear for layer in layers) * limits.itemsize(config.model.dtype)


def linear_itemsize(config: Config) -> float:
    """Bytes of an element of a linear layer, its share of a scale among them."""
    if fp8_weights(config.rollout):
        return 1 + SCALE / BLOCK**2
    return limits.itemsize(config.model.dtype)


def cache_itemsize(config: Config) -> int:
    """Bytes of an element of the KV cache; a byte of those that vLLM packs closer."""
    if small_cache(config.rollout):
        return 1
    own = config.rollout.options.get("kv_cache_dtype") or "auto"
    return limits.itemsize(config.model.dtype if own == "auto" else own)


def kv_bytes_per_token(d: Decoder, tensor: int, size: int) -> int:
    """Bytes of one token in the cache of an engine worker, over all layers."""
    return sum(count * block.kv_bytes_per_token(tensor, size) for kind, count in d.counted() for block in kind)


@lru_cache(maxsize=256)
def engine_elements(d: Decoder, tensor: int, data: int, experts_dealt: bool, worker: int) -> Elements:
    """Of an engine worker's parameters, from the boxes in `models.engine`."""
    total = Elements()
    for kind, count in d.counted():
        shard = engine.shard(d.of_one_layer(kind), tensor, worker, experts_dealt, data)
        total += _elements(shard, layers=True) * count
    return total + _elements(shard, layers=False)


def _of(config: Config, d: Decoder, worker: int) -> Elements:
    rollout = config.rollout
    return engine_elements(d, rollout.tensor, engine_data(rollout), expert_parallel(rollout), worker)


def _elements(shard: Shard, layers: bool) -> Elements:
    """Of the parameters in decoder layers, or of all others."""
    linear = {piece.param for piece in shard.pieces if piece.tensor in quantised([piece.tensor])}
    total = Elements()
    for name, shape in shard.params.items():
        if (".layers." in name) != layers:
            continue
        if name in linear:
            *stack, rows, columns = shape
            blocks = prod(stack) * -(-rows // BLOCK) * -(-columns // BLOCK)
            total += Elements(linear=prod(shape), blocks=blocks)
        else:
            total += Elements(plain=prod(shape))
    return total
