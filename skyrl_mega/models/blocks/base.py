"""The interface of a block: attention, a feed-forward part, the embedding, the head.

A block is a part of a decoder layer (or comes before or after all layers) with sizes read from config.json. Everything
specific to an architecture is a method of a block, so a new architecture is just a file here and a file in `families/`.
Blocks derive from `Block` to inherit defaults for common answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims, RankCoords

Spec = Literal["local", "te"]
"""Megatron's layers: `local` is megatron-core's own; `te` is Transformer Engine's, which fuses the norm before a linear
layer into that layer, and keeps a rank's experts in a grouped linear layer."""

Tensors = dict[str, tuple[int, ...]]
"""Name → shape."""


@dataclass(frozen=True)
class MegatronSettings:
    """Settings fixed by the architecture; sizes of the parallel grid, dtypes and recipes come from the policy."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `TransformerConfig`."""
    gpt: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `GPTModel`; `vocab_size` is the tokenizer's, to be padded with `padded_vocab`."""


@dataclass(frozen=True)
class LayerModules:
    """The modules of a layer that megatron-core's configuration does not name; `megatron.layer_spec` builds them."""

    query_key_norm: Literal["none", "head", "all_heads"] = "none"
    """RMSNorm of queries and keys: over each head, or over all heads together."""


@dataclass(frozen=True)
class Cut:
    """A size of the model divided by a dimension of the policy's layout."""

    dimension: Literal["tensor", "expert", "expert_tensor"]
    what: str
    """Description for errors, such as `attention heads`."""
    total: int
    column: str | None = None
    """Column of the dry run's table with the part held by a rank; None: not shown."""


@dataclass(frozen=True)
class MegatronPlace:
    """A model chunk of a policy rank."""

    parallel: ParallelDims
    coords: RankCoords
    chunk: int
    spec: Spec

    @property
    def first(self) -> bool:
        """True for the first chunk of the model."""
        return self.parallel.holds_embedding(self.coords.pp, self.chunk)

    @property
    def last(self) -> bool:
        """True for the last chunk of the model."""
        return self.parallel.holds_head(self.coords.pp, self.chunk)


@dataclass(frozen=True)
class EngineCut:
    """The division of an engine: `data` replicas, one after the other, of `tensor` workers.

    Experts are divided over all workers as one group: each expert is split by columns, or with `expert_parallel` whole
    experts are assigned to workers. Everything else is split over `tensor` and replicated over `data`.
    """

    tensor: int
    expert_parallel: bool = False
    data: int = 1

    @property
    def workers(self) -> int:
        """Number of all workers."""
        return self.tensor * self.data

    @property
    def whole_experts(self) -> bool:
        """True if a worker holds all columns of an assigned expert."""
        return self.expert_parallel or self.workers == 1


@dataclass(frozen=True)
class Work:
    """A micro-batch on a policy rank, for estimating the memory kept for the backward pass."""

    parallel: ParallelDims
    tokens: int
    """Tokens on this rank, hence on a single context rank."""
    itemsize: int
    """Bytes of an element."""
    imbalance: float
    """Tokens of the busiest rank's experts, relative to the mean."""
    spec: Spec = "local"
    fused: frozenset[str] = frozenset()
    """Active entries of `policy.fusions` (`config.derived.fused`)."""


@dataclass(frozen=True)
class TokenFlops:
    """Floating point operations of a token in a forward pass."""

    matrices: float
    """Two per element of each matrix multiplied with the token."""
    attention: float = 0.0
    """Operations per previous token, to be multiplied by the number of previous tokens."""
    decoding: float | None = None
    """Operations per previous token while an engine decodes; None: `attention`."""


@dataclass(frozen=True)
class Messages:
    """Elements sent to other ranks in a token's forward pass."""

    tensor: float = 0.0
    """Gathered before the block, and scattered after it, over the tensor-parallel ranks."""
    context: float = 0.0
    """Gathered over the context-parallel ranks, from a single tensor rank."""
    experts: float = 0.0
    """Sent to experts, and back."""


class Block(Protocol):
    """A part of a model, as a frozen dataclass: equal sizes are equal blocks.

    `source` is a layer's prefix in the Hugging Face names (`model.layers.3`), `target` the prefix in Megatron's names
    (`0.decoder.layers.1`).
    """

    # --- Hugging Face ---

    def hf_tensors(self, source: str) -> Tensors:
        """Returns the tensors of a checkpoint on disk. Linear weights are [out, in]."""
        ...

    def float32_tensors(self, source: str) -> Sequence[str]:
        """Returns the tensors that stay in float32 in a model of any dtype: in the policy, on the wire, in engines."""
        return ()

    # --- Megatron ---

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        """Returns megatron-core's keyword arguments for this block; `layers` is True for layers with this block."""
        ...

    def layer_modules(self) -> LayerModules | None:
        """Returns the modules of an attention block; None for other blocks."""
        return None

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Declares the parameters of a rank in the order of `named_parameters()`, with the pieces that fill them."""
        ...

    def megatron_cuts(self) -> Sequence[Cut]:
        """Returns the sizes that the policy's layout must divide."""
        return ()

    def megatron_widths(self) -> Sequence[Cut]:
        """Returns the widths of linear layers split by a layout; of several widths in a layer, only the split one."""
        return ()

    def check_megatron(self, parallel: ParallelDims, key: str) -> None:
        """Refuses layouts that train incorrectly, beyond `megatron_cuts`; the UserError names `key`."""

    def check_fp8(self, key: str) -> None:
        """Refuses FP8 (training, wire or engine) where the block has not been shown with it; the UserError names
        `key`."""

    # --- vLLM ---

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Declares the load-time parameters of a worker, with the pieces that fill them."""
        ...

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        """Returns the sizes that the tensor-parallel size must divide, as (description for errors, size)."""
        return ()

    def check_engine(self, cut: EngineCut, key: str) -> None:
        """Refuses engine sizes unsupported by vLLM for this block, beyond `engine_cuts`; the UserError names `key`."""

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        """Returns the numbers of columns held by a worker, for weights stored in blocks in an FP8 checkpoint."""
        return {}

    def check_cpu_engine(self, prefix: str) -> None:
        """Refuses widths that vLLM cannot compute on a CPU; the UserError names `prefix` and the key of config.json."""

    def engine_arguments(self, device: str) -> Mapping[str, Any]:
        """Returns the vLLM arguments without which this block computes wrong results on `cpu` or `cuda`."""
        return {}

    # --- cost ---

    def flops(self) -> TokenFlops:
        """Returns the operations of a token."""
        ...

    def saved_bytes(self, work: Work) -> float:
        """Returns the bytes kept by autograd for the backward pass, including the input."""
        ...

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """Returns the bytes kept by autograd with `policy.recompute` other than `full`, in Transformer Engine's
        layers."""
        return self.saved_bytes(work)

    def gradient_bytes(self, work: Work) -> float:
        """Returns the largest total bytes of activation and weight gradients alive at once in the backward pass."""
        return 0.0

    def messages(self, parallel: ParallelDims) -> Messages:
        """Returns the elements sent in a token's forward pass."""
        return Messages()

    def kv_bytes_per_token(self, tensor: int, itemsize: int) -> int:
        """Returns the bytes per token in an engine worker's cache."""
        return 0

    def engine_width(self, cut: EngineCut) -> float:
        """Returns the elements per token held by an engine worker while computing the block, besides hidden states."""
        return 0.0

    def engine_sparse(self, cut: EngineCut) -> tuple[float, float]:
        """Returns the elements of a worker's weights that a token reads only in part, and the fraction (0 to 1)."""
        return 0.0, 0.0

    # --- for people ---

    def facts(self) -> Mapping[str, int]:
        """Returns the sizes shown by the dry run: `heads`, `kv_heads`, `experts`, …"""
        return {}

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        """Returns the heads and experts held by a worker, as columns of the dry run's table."""
        return {}


def share(total: int, parts: int, index: int) -> str:
    """Returns the `index`-th of `parts` equal parts of `total` items, as `first-last`."""
    size = total // parts
    first = index * size
    return f"{first}-{first + size - 1}" if size > 1 else str(first)
