"""The interface of a block: attention, a feed-forward part, the embedding, the head.

A block is a part of a decoder layer (or comes before or after all layers) with sizes read from config.json. Everything
specific to an architecture is a method of a block, so a new architecture is just a file here and a file in `families/`.
Blocks derive from `Block` to inherit defaults for common answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import engine_data, expert_parallel
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.models.disk_form import DiskForm
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims, RankCoords

Spec = Literal["local", "te"]
"""Megatron's layers: `local` is megatron-core's own; `te` is Transformer Engine's, which fuses the norm before a linear
layer into that layer, and keeps a rank's experts in a grouped linear layer."""

Tensors = dict[str, tuple[int, ...]]
"""Name of a tensor in a Hugging Face checkpoint → shape."""


@dataclass(frozen=True)
class MegatronSettings:
    """Arguments of megatron-core fixed by the architecture; sizes of the parallel grid, dtypes and recipes come from
    the policy's settings."""

    transformer: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `TransformerConfig`."""
    gpt: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `GPTModel`; `vocab_size` is the tokenizer's, to be padded with `padded_vocab`."""


@dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a gated delta net, or of a tensor rank's part."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values: a multiple of `key_heads`."""
    key_width: int
    """Width of a query and a key."""
    value_width: int
    """Width of a value."""
    window: int
    """Tokens read by the convolution."""

    @property
    def keys(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_width

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def part(self, ranks: int) -> DeltaNetSizes:
        """Returns the sizes of one of `ranks` equal parts; `ranks` divides the key heads."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


@dataclass(frozen=True)
class LayerModules:
    """The modules of a layer that megatron-core's configuration does not name; `megatron.layer_spec` builds them."""

    query_key_norm: Literal["none", "head", "all_heads"] = "none"
    """RMSNorm of queries and keys: over each head, or over all heads together."""
    delta_net: DeltaNetSizes | None = None
    """Sizes of a gated delta net, which replaces the layer's attention; None: attention."""
    sinks: bool = False
    """True for a sink in every head's softmax."""
    window: int | None = None
    """Number of tokens, itself included, that a token attends to; None: all earlier ones."""


@dataclass(frozen=True)
class Cut:
    """A size of the model that a dimension of the policy's layout must divide: each rank holds an equal part."""

    dimension: Literal["tensor", "expert", "expert_tensor"]
    what: str
    """Description for errors, such as `attention heads`."""
    total: int
    column: str | None = None
    """Column of the dry run's table with the part held by a rank; None: not shown."""
    of_heads: bool = False
    """True for a number of attention heads, which context ranks may split as well (`ParallelDims.by_heads`)."""


@dataclass(frozen=True)
class MegatronPlace:
    """The place of a model chunk: the layout, the rank's coordinates, and the index of the chunk on the rank."""

    parallel: ParallelDims
    coords: RankCoords
    chunk: int
    spec: Spec

    @property
    def first(self) -> bool:
        """True for the first chunk of the model, with the embedding."""
        return self.parallel.holds_embedding(self.coords.pp, self.chunk)

    @property
    def last(self) -> bool:
        """True for the last chunk of the model, with the final norm and the head."""
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

    @classmethod
    def of(cls, rollout: RolloutConfig) -> EngineCut:
        """Returns the division in the settings."""
        return cls(rollout.tensor, expert_parallel(rollout), engine_data(rollout))

    @property
    def workers(self) -> int:
        """Number of all workers: `tensor` · `data`."""
        return self.tensor * self.data

    @property
    def whole_experts(self) -> bool:
        """True if a worker holds all columns of each of its experts: with expert parallelism, or with one worker."""
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
    repeated_keys: float = 0.0
    """Tokens per token of the micro-batch whose keys and values attention repeats for other sequences
    (`policy.share_prefixes`)."""


@dataclass(frozen=True)
class TokenFlops:
    """Floating point operations of a token in a forward pass."""

    matrices: float
    """Two per element of each matrix multiplied with the token."""
    attention: float = 0.0
    """Operations per previous token, to be multiplied by the number of previous tokens."""
    decoding: float | None = None
    """Operations per previous token while an engine decodes; None: `attention`."""
    window: int | None = None
    """Upper bound of the number of previous tokens, itself included; None: no bound."""


@dataclass(frozen=True)
class Messages:
    """Elements (not bytes) of a token exchanged with other ranks in the forward pass of a block."""

    tensor: float = 0.0
    """Gathered over the tensor-parallel ranks before the block, and as many scattered after the block."""
    context: float = 0.0
    """Received from each of the other context-parallel ranks, by a single tensor rank."""
    experts: float = 0.0
    """Sent to experts, and back."""


class Block(Protocol):
    """A part of a model, as a frozen dataclass: equal sizes are equal blocks.

    `source` is a layer's prefix in the Hugging Face names (`model.layers.3`), `target` the prefix in Megatron's names
    (`0.decoder.layers.1`).
    """

    # --- Hugging Face ---

    def hf_tensors(self, source: str) -> Tensors:
        """Returns name → shape of the block's tensors in a Hugging Face checkpoint. Linear weights are [out, in]. The
        names begin with `source`, such as `model.layers.3`; the embedding and the head ignore it. A tensor may have
        another order of axes on disk (`disk_forms`)."""
        ...

    def float32_tensors(self, source: str) -> Sequence[str]:
        """Returns the names of the tensors that stay in float32 in a model of any dtype: in the policy, on the wire and
        in engines; () by default."""
        return ()

    def frozen_tensors(self, source: str) -> Sequence[str]:
        """Returns the names of the tensors among `float32_tensors` that are never trained; by default all of them."""
        return self.float32_tensors(source)

    def disk_forms(self, source: str) -> Mapping[str, DiskForm]:
        """Returns name → order of axes on disk of the tensors with another order in `hf_tensors`; {} by default."""
        return {}

    # --- Megatron ---

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        """Returns megatron-core's keyword arguments for this block.

        Args:
            layers: One entry per layer of the model: True if the layer contains this block.
        """
        ...

    def layer_modules(self) -> LayerModules | None:
        """Returns the modules of an attention block; None for other blocks."""
        return None

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Adds the block's parameters on a policy rank to the builder `b`, in the order of `named_parameters()`, each
        with the pieces of Hugging Face tensors that fill the parameter. Layouts refused by `megatron_cuts` may give
        wrong pieces without an error.

        Args:
            b: Builder of the rank's shard.
            place: The layout, the rank and the model chunk.
            target: Prefix of Megatron's names, such as `0.decoder.layers.1`.
            source: Prefix of the Hugging Face names, such as `model.layers.3`.
        """
        ...

    def megatron_cuts(self) -> Sequence[Cut]:
        """Returns the sizes of the block that dimensions of the policy's layout must divide; () by default."""
        return ()

    def megatron_widths(self) -> Sequence[Cut]:
        """Returns the widths of the block's linear layers for FP8's checks: of rows and columns of a weight, the side
        split by a layout; () by default."""
        return ()

    def check_megatron(self, parallel: ParallelDims, key: str) -> None:
        """Raises UserError, naming a setting under `key` or config.json, for a layout allowed by `megatron_cuts` that
        trains incorrectly or cannot be built; does nothing for any other layout."""

    def check_fp8(self, key: str) -> None:
        """Raises UserError, naming `key`, if the block has not been tested with FP8 in training, on the wire and in
        engines. Does nothing for a tested block."""

    # --- vLLM ---

    def check_shared_prefixes(self, key: str) -> None:
        """Raises UserError if the policy cannot compute common first tokens of sequences once. `key` is the setting
        that asks for it."""

    def engine_float32(self, source: str) -> Sequence[str]:
        """Returns the names of an engine worker's parameters that vLLM keeps in float32 in a model of any dtype; by
        default `float32_tensors`."""
        return self.float32_tensors(source)

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Adds the block's load-time parameters on engine worker `worker` (0 … `cut.workers` - 1) to the builder `b`,
        each with the pieces of Hugging Face tensors that fill the parameter. Divisions refused by `check_engine` or
        `engine_cuts` may give wrong pieces without an error. `source` is the prefix of the names, such as
        `model.layers.3`."""
        ...

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        """Returns the sizes of the block that the engine's tensor-parallel size must divide, as (description for
        errors, size); () by default."""
        return ()

    def check_engine(self, cut: EngineCut, key: str) -> None:
        """Raises UserError, naming `key` or config.json, for a division of an engine allowed by `engine_cuts` that vLLM
        does not support for this block; does nothing for any other division."""

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        """Returns description → number of columns of a weight held by a worker; {} by default, for a block without
        requirements. The caller demands multiples of 128 for an engine in block FP8; nothing is checked here."""
        return {}

    def check_cpu_engine(self, prefix: str, dtype: str) -> None:
        """Raises UserError for a width or a type not supported by vLLM on a CPU; does nothing otherwise.

        Args:
            prefix: Text before config.json's key in an error about a width.
            dtype: Value of `model.dtype`.
        """

    def engine_arguments(self, device: str) -> Mapping[str, Any]:
        """Returns the vLLM arguments without which this block computes wrong results on `device` (`cpu` or `cuda`):
        argument of the engine → value; {} if no argument is needed."""
        return {}

    # --- cost ---

    def flops(self) -> TokenFlops:
        """Returns the floating point operations of a token in the block's forward pass, the sum over all ranks."""
        ...

    def saved_bytes(self, work: Work) -> float:
        """Returns the bytes kept by autograd on a rank from the block's forward to its backward pass, including the
        block's input, without recomputation; for one micro-batch and one layer."""
        ...

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """Returns the bytes kept by autograd as in `saved_bytes`, without the tensors that `recompute`, a value of
        `policy.recompute` (`none`, `selective` or `moe`), recomputes, in Transformer Engine's layers; with `none`, and
        for every value by default, all of `saved_bytes`."""
        return self.saved_bytes(work)

    def gradient_bytes(self, work: Work) -> float:
        """Returns the peak of bytes of activation and weight gradients alive at once on a rank in the backward pass of
        one layer's block; 0 by default."""
        return 0.0

    def messages(self, parallel: ParallelDims) -> Messages:
        """Returns the elements exchanged between policy ranks for a token in the block's forward pass; all 0 by
        default."""
        return Messages()

    def kv_bytes_per_token(self, tensor: int, itemsize: int) -> int:
        """Returns the bytes per token for this block of one layer in the KV cache of an engine worker; 0 by default.

        Args:
            tensor: Tensor parallelism of the engine.
            itemsize: Bytes of a cached element.
        """
        return 0

    def kv_window(self) -> int | None:
        """Returns the number of a sequence's last tokens that an engine's KV cache keeps for this block; None, the
        default: all tokens."""
        return None

    def state_bytes(self, cut: EngineCut, itemsize: int, drafts: int = 0) -> int:
        """Returns the bytes of a sequence's state in an engine worker for this block of one layer, besides the KV
        cache: a state of a convolution or a recurrent layer, of constant size whatever the length; 0 by default.

        Args:
            cut: The division of the engine.
            itemsize: Bytes of an element in the model's type.
            drafts: Maximum number of draft tokens per sequence and step.
        """
        return 0

    def engine_width(self, cut: EngineCut) -> float:
        """Returns the elements per token held by an engine worker while computing the block, besides hidden states; 0
        by default."""
        return 0.0

    def engine_sparse(self, cut: EngineCut) -> tuple[float, float]:
        """Returns the number of elements of a worker's sparsely read weights (experts), and the fraction of these
        elements read by a token (0 to 1); (0, 0) for a block without any."""
        return 0.0, 0.0

    # --- for people ---

    def facts(self) -> Mapping[str, int]:
        """Returns name → size for the dry run and `Decoder.facts`, with names of the block's choice (`heads`,
        `kv_heads`, `experts`); {} by default."""
        return {}

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        """Returns the heads and experts held by a worker (0 … `cut.workers` - 1), as columns of the dry run's table:
        name → numbers from 0, as text of `share`; {} for a block without any."""
        return {}


def exchanged(elements: float, parallel: ParallelDims) -> float:
    """Returns `Messages.context` of an attention layer: elements (not bytes) that a tensor rank receives for a token
    from each of the other context ranks.

    A ring passes every token's keys and values to every other context rank. An all-to-all sends each of the other ranks
    that rank's part of the heads.

    Args:
        elements: Elements of a token in the messages, over all heads: keys and values, and with an all-to-all queries
            and results too.
        parallel: The layout.
    """
    return elements / parallel.tensor / (parallel.context if parallel.by_heads else 1)


def without_fp8(problem: str, key: str) -> UserError:
    """Returns, without raising, the refusal of FP8 (training, wire or engine) for a block not tested with FP8.

    Args:
        problem: The reason, naming the block; starts the message.
        key: The setting that asks for FP8.
    """
    fix = "give policy.precision.recipe=model, weights.wire=auto and engines without quantization"
    return UserError(problem, key=key, fix=fix)


def indivisible(by: str, total: int, what: str, key: str) -> UserError:
    """Returns the error for a size that a setting does not divide.

    Args:
        by: Beginning of the sentence, such as `4 does not divide`.
        total: The size, in units of `what`.
        what: Plural noun of what `total` counts.
        key: The setting.
    """
    return UserError(f"{by} the model's {total} {what}; choose a divisor of {total}", key=key)


def check_cpu_width(what: str, key: str, width: int, allowed: Sequence[int]) -> None:
    """Raises UserError if vLLM has no kernel of this width on a CPU; does nothing for a width in `allowed`.

    Args:
        what: Name of the layer.
        key: The setting of the width.
        width: Elements of a head, or of a latent vector.
        allowed: The widths of vLLM's kernel.
    """
    if width not in allowed:
        numbers = f"{'are' if len(allowed) > 1 else 'is'} {', '.join(map(str, allowed))}"
        raise UserError(
            f"vLLM has no {what} of this width on a CPU; allowed {numbers}, or cluster.device=cuda",
            key=key,
            value=width,
        )


def share(total: int, parts: int, index: int) -> str:
    """Returns the items in part `index` of `parts` equal parts of `total` items, as text: `first-last`, or the number
    of a single item. Parts and items are counted from 0; `parts` divides `total`."""
    size = total // parts
    first = index * size
    return f"{first}-{first + size - 1}" if size > 1 else str(first)
