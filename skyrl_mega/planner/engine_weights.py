"""Memory of the model in an engine worker: weights in the model's type or in block FP8, and KV cache per token.

FP8 engines (`rollout.options.quantization`, `hf_overrides.quantization_config`; docs/weight-sync.md) store a byte per
element of a linear layer and a float32 scale per block of 128 × 128. Embedding, head, routers and norms stay in
`model.dtype`. vLLM keeps some routers and all correction biases in float32 (`Block.engine_float32`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from skyrl_mega.common import limits
from skyrl_mega.config.derived import (
    fp8_parameters,
    fp8_weights,
    length_limit,
    small_cache,
)
from skyrl_mega.config.drafts import draft_tokens
from skyrl_mega.config.schema import Config
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.models import engine
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.fp8.format import quantised

SCALE = 4
"""Bytes of the scale of a block."""
CACHED_STATES = 2
"""States of a running sequence in vLLM 0.32 with prefix caching and without drafts
(`MambaSpec.max_memory_usage_bytes`)."""


@dataclass(frozen=True)
class Elements:
    """Element counts of the parameters of an engine worker."""

    plain: int = 0
    """Elements of never quantised parameters in `model.dtype`."""
    linear: int = 0
    """Elements of linear layers, stored in FP8 if the engine serves FP8."""
    blocks: int = 0
    """Blocks of 128 × 128 in the linear layers."""
    float32: int = 0
    """Elements of parameters that stay in float32."""

    @property
    def all(self) -> int:
        """Number of all elements: `plain` + `linear` + `float32`."""
        return self.plain + self.linear + self.float32

    def bytes(self, itemsize: int, fp8: bool) -> int:
        """Returns the bytes of all elements.

        Args:
            itemsize: Bytes of an element outside of FP8 and float32.
            fp8: True if linear layers are in FP8, a byte per element and a scale per block.
        """
        linear = self.linear + self.blocks * SCALE if fp8 else self.linear * itemsize
        return self.plain * itemsize + linear + self.float32 * limits.itemsize("float32")

    def __add__(self, other: Elements) -> Elements:
        sums = (self.plain + other.plain, self.linear + other.linear, self.blocks + other.blocks)
        return Elements(*sums, self.float32 + other.float32)

    def __mul__(self, times: int) -> Elements:
        return Elements(self.plain * times, self.linear * times, self.blocks * times, self.float32 * times)


def engine_bytes(config: Config, decoder: Decoder, worker: int = 0) -> int:
    """Returns the bytes of the weights in engine worker `worker`, counted within the engine, as kept while it generates
    (in FP8, with scales, if the engine serves FP8), without the weights of drafts."""
    return _worker_elements(config, decoder, worker).bytes(
        limits.itemsize(config.model.dtype), fp8_weights(config.rollout)
    )


def staged_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes that an engine worker needs in addition during a sync: the unquantised linear weights of the
    largest layer, until vLLM quantises the layer. 0 unless engines quantise weights themselves."""
    rollout = config.rollout
    if not fp8_weights(rollout) or fp8_parameters(rollout):
        return 0
    cut = EngineCut.of(rollout)
    models = map(decoder.of_one_layer, decoder.kinds)
    layers = (_elements(engine.shard(layer, cut, 0), layer.engine_float32, layers=True) for layer in models)
    return max(layer.linear for layer in layers) * limits.itemsize(config.model.dtype)


def linear_itemsize(config: Config) -> float:
    """Returns the bytes per element of a linear layer in an engine, with FP8 including the share of a block's scale."""
    if fp8_weights(config.rollout):
        return 1 + SCALE / BLOCK**2
    return limits.itemsize(config.model.dtype)


def cache_itemsize(config: Config) -> int:
    """Returns the bytes per element of an engine's KV cache (`kv_cache_dtype`, by default the model's type); formats
    smaller than a byte count as 1."""
    if small_cache(config.rollout):
        return 1
    dtype = config.rollout.options.get("kv_cache_dtype") or "auto"
    return limits.itemsize(config.model.dtype if dtype == "auto" else dtype)


def kv_bytes_per_token(decoder: Decoder, tensor: int, size: int) -> int:
    """Returns the KV cache bytes per token in an engine worker, over all layers that keep every token; layers with
    sliding windows count in `sequence_bytes`.

    Args:
        decoder: The model.
        tensor: Tensor parallelism of the engine.
        size: Bytes of an element of the cache.
    """
    return sum(
        count * block.kv_bytes_per_token(tensor, size)
        for kind, count in decoder.layer_counts()
        for block in kind
        if block.kv_window() is None
    )


def window_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the KV cache bytes in an engine worker of a sequence longer than every sliding window, in the layers with
    windows; 0 without such layers."""
    tensor, size = config.rollout.tensor, cache_itemsize(config)
    blocks = ((count, block) for kind, count in decoder.layer_counts() for block in kind)
    return sum(count * (block.kv_window() or 0) * block.kv_bytes_per_token(tensor, size) for count, block in blocks)


def prompt_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes that a longest sequence takes in the cache beside `sequence_bytes` while its prompt is
    computed: tokens of a step that later leave the sliding windows.

    vLLM 0.32 refuses to start unless the cache has space for such a sequence (`check_enough_kv_cache_memory`).
    """
    rollout, longest = config.rollout, length_limit(config.rollout)
    step = int(rollout.options.get("max_num_batched_tokens") or max(longest, limits.ENGINE_STEP_TOKENS))
    tensor, size, total = rollout.tensor, cache_itemsize(config), 0
    for kind, count in decoder.layer_counts():
        for block in kind:
            if window := block.kv_window():
                kept = min(longest, window - 1 + step)
                total += count * max(0, kept - window) * block.kv_bytes_per_token(tensor, size)
    return total


def state_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes of one state of a sequence in an engine worker, over all layers: of convolutions and recurrent
    layers, the same for every length. 0 for a model with attention only."""
    rollout = config.rollout
    cut = EngineCut.of(rollout)
    size, drafts = limits.itemsize(config.model.dtype), draft_tokens(rollout)
    return sum(count * block.state_bytes(cut, size, drafts) for kind, count in decoder.layer_counts() for block in kind)


def sequence_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes of a sequence in the cache of an engine worker without the part that grows with the length: the
    states of convolutions and recurrent layers, and the keys and values of sliding windows.

    Without prefix caching vLLM keeps a single state of a running sequence. With prefix caching vLLM keeps two states:
    the present state, and the state at the end of the last full block, from which a later request with the same prefix
    continues. In both cases a further state for each draft token allows the engine to go back to the last accepted
    token.
    """
    return states(config) * state_bytes(config, decoder) + window_bytes(config, decoder)


def states(config: Config) -> int:
    """Returns the number of states of a running sequence, for a model with states."""
    return (CACHED_STATES if prefix_caching(config) else 1) + draft_tokens(config.rollout)


def prefix_caching(config: Config) -> bool:
    """Returns True if engines keep the states of prefixes for later requests: by default, unless the option
    `enable_prefix_caching` of `rollout.options` is False; never on a CPU, where vLLM cannot."""
    return config.cluster.device != "cpu" and config.rollout.options.get("enable_prefix_caching") is not False


@lru_cache(maxsize=256)
def engine_elements(decoder: Decoder, cut: EngineCut, worker: int) -> Elements:
    """Returns the element counts of an engine worker's parameters, from the boxes in `models.engine`.

    Args:
        decoder: The model.
        cut: Division of the model over the engine's workers.
        worker: Number of the worker in the engine, from 0.
    """
    total = Elements()
    for kind, count in decoder.layer_counts():
        layer = decoder.of_one_layer(kind)
        shard = engine.shard(layer, cut, worker)
        total += _elements(shard, layer.engine_float32, layers=True) * count
    return total + _elements(shard, frozenset(), layers=False)


def _worker_elements(config: Config, decoder: Decoder, worker: int) -> Elements:
    return engine_elements(decoder, EngineCut.of(config.rollout), worker)


def _elements(shard: Shard, float32: frozenset[str], layers: bool) -> Elements:
    """Counts the elements of parameters inside (`layers`) or outside decoder layers; `float32`: names of parameters
    that stay in float32."""
    linear = {piece.param for piece in shard.pieces if piece.tensor in quantised([piece.tensor])}
    total = Elements()
    for name, shape in shard.params.items():
        if (".layers." in name) != layers:
            continue
        if name in linear:
            *stack, rows, columns = shape
            blocks = prod(stack) * -(-rows // BLOCK) * -(-columns // BLOCK)
            total += Elements(linear=prod(shape), blocks=blocks)
        elif name in float32:
            total += Elements(float32=prod(shape))
        else:
            total += Elements(plain=prod(shape))
    return total
