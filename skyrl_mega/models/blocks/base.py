"""What a block says of itself: attention, a feed-forward part, the embedding, the head.

A block is a part of a decoder layer (or stands before or after all layers) with sizes read from config.json. Everything
that depends on the architecture is asked of it, so that adding one is a file here and a file in `families/`. What most
blocks answer alike has a default; a block derives from `Block` to take it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims, RankCoords

Spec = Literal["local", "te"]
"""Megatron's layers: `local` is megatron-core's own; `te` is Transformer Engine's, which fuses the norm before a linear
layer into it and keeps a rank's experts in one grouped linear layer."""

Tensors = dict[str, tuple[int, ...]]
"""Name → shape."""


@dataclass(frozen=True)
class MegatronSettings:
    """What the architecture fixes; sizes of the parallel grid, types and recipes are the policy's."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `TransformerConfig`."""
    gpt: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `GPTModel`; `vocab_size` is the tokenizer's, pad it with `padded_vocab`."""


@dataclass(frozen=True)
class Cut:
    """What a dimension of the policy's layout divides."""

    dimension: Literal["tensor", "expert", "expert_tensor"]
    what: str
    """As an error calls it: `attention heads`."""
    total: int
    column: str | None = None
    """Column of the dry run's table that shows which of them a rank holds; None: not shown."""


@dataclass(frozen=True)
class MegatronPlace:
    """Which model chunk of which policy rank."""

    parallel: ParallelDims
    coords: RankCoords
    chunk: int
    spec: Spec

    @property
    def first(self) -> bool:
        """Whether the chunk begins the model."""
        return self.parallel.holds_embedding(self.coords.pp, self.chunk)

    @property
    def last(self) -> bool:
        """Whether the chunk ends the model."""
        return self.parallel.holds_head(self.coords.pp, self.chunk)


@dataclass(frozen=True)
class EngineCut:
    """One engine: `data` replicas, one after the other, of `tensor` workers.

    Experts see all workers as one group: each is cut by columns over them, or with `expert_parallel` whole experts are
    dealt to them. All else is cut over `tensor` and replicated over `data`.
    """

    tensor: int
    expert_parallel: bool = False
    data: int = 1

    @property
    def workers(self) -> int:
        """All of them."""
        return self.tensor * self.data

    @property
    def whole_experts(self) -> bool:
        """Whether a worker that has an expert has all of its columns."""
        return self.expert_parallel or self.workers == 1


@dataclass(frozen=True)
class Work:
    """A micro-batch on one policy rank, for counting what is kept of it."""

    parallel: ParallelDims
    tokens: int
    """On this rank, that is on one context rank."""
    itemsize: int
    """Bytes of an element."""
    imbalance: float
    """Tokens of the busiest rank's experts over the mean."""
    spec: Spec = "local"
    fused: frozenset[str] = frozenset()
    """Which of `policy.fusions` run (`config.derived.fused`)."""


@dataclass(frozen=True)
class TokenFlops:
    """Floating point operations of one token in one forward pass."""

    matrices: float
    """Two for every element of a matrix that the token meets."""
    attention: float = 0.0
    """Of a token that has one token before it; grows with how many there are."""


@dataclass(frozen=True)
class Messages:
    """Elements that one token's forward pass sends to other ranks."""

    tensor: float = 0.0
    """Gathered before the block, and scattered after it, over the tensor-parallel ranks."""
    context: float = 0.0
    """Gathered over the context-parallel ranks, from one tensor rank."""
    experts: float = 0.0
    """Sent to experts, and back."""


class Block(Protocol):
    """A part of a model. `source` is a layer's prefix in the Hugging Face names (`model.layers.3`), `target` its prefix
    in Megatron's (`0.decoder.layers.1`). Blocks are frozen dataclasses: equal sizes are equal blocks."""

    # --- Hugging Face ---

    def hf_tensors(self, source: str) -> Tensors:
        """Tensors of a checkpoint on disk. Linear weights are [out, in]."""
        ...

    # --- Megatron ---

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        """Keyword arguments that make megatron-core compute it; `layers` says which layers have this block."""
        ...

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Declares the parameters of a rank, in the order of `named_parameters()`, and what fills them."""
        ...

    def megatron_cuts(self) -> Sequence[Cut]:
        """What the policy's layout must divide."""
        return ()

    def megatron_widths(self) -> Sequence[Cut]:
        """Widths of its linear layers that a layout cuts; of several in one layer, what a cut goes through."""
        return ()

    def check_megatron(self, parallel: ParallelDims, key: str) -> None:
        """Refuses any other layout that would train wrong, with a UserError that names `key`."""

    # --- vLLM ---

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Declares the load-time parameters of a worker, and what fills them."""
        ...

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        """What the tensor-parallel size must divide, by the name that an error gives it."""
        return ()

    def check_engine(self, cut: EngineCut, key: str) -> None:
        """Refuses any other size that vLLM cannot cut this block into, with a UserError that names `key`."""

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        """Columns that a worker holds of what an FP8 checkpoint keeps in blocks."""
        return {}

    # --- cost ---

    def flops(self) -> TokenFlops:
        """Of one token."""
        ...

    def saved_bytes(self, work: Work) -> float:
        """What autograd keeps of it for the backward pass, its input among it."""
        ...

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """The same where the backward pass computes parts of a layer again: `policy.recompute`, but for `full`, in
        Transformer Engine's layers."""
        return self.saved_bytes(work)

    def gradient_bytes(self, work: Work) -> float:
        """Gradients of its activations and weights that exist together while it goes backward."""
        return 0.0

    def messages(self, parallel: ParallelDims) -> Messages:
        """What a token's forward pass sends."""
        return Messages()

    def kv_bytes_per_token(self, tensor: int, itemsize: int) -> int:
        """Of an engine worker's cache."""
        return 0

    def engine_width(self, cut: EngineCut) -> float:
        """Elements of one token that an engine worker holds while it computes the block, beside hidden states."""
        return 0.0

    def engine_sparse(self, cut: EngineCut) -> tuple[float, float]:
        """Elements of a worker's weights of which one token reads a part only, and that part (0 to 1)."""
        return 0.0, 0.0

    # --- for people ---

    def facts(self) -> Mapping[str, int]:
        """Its sizes, as the dry run shows them: `heads`, `kv_heads`, `experts`, …"""
        return {}

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        """Which heads and experts a worker holds, as columns of the dry run's table."""
        return {}


def share(total: int, parts: int, index: int) -> str:
    """The `index`-th of equal parts of `total` things, as `first-last`."""
    size = total // parts
    first = index * size
    return f"{first}-{first + size - 1}" if size > 1 else str(first)
