"""A decoder-only transformer as blocks: the embedding, the blocks of every layer, the head.

A family (`families/`) reads the blocks from config.json. Everything specific to a block is a method of the block
(`blocks/base.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from skyrl_mega.models.blocks.base import Block
from skyrl_mega.models.blocks.embedding import EMBEDDING, Embedding, Head
from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.blocks.value_head import ValueHeadBlock
from skyrl_mega.models.config_json import Hf, integer, number
from skyrl_mega.models.disk_form import DiskForm
from skyrl_mega.models.quantization import check_quantisation

MODEL = "model"
"""Beginning of the names of the tensors that blocks declare."""
Layer = tuple[Block, ...]
"""The blocks of a layer, in execution order."""


@dataclass(frozen=True)
class Decoder:
    """The blocks of a model, with the sizes shared by all blocks.

    Layers are stored by kind, since models have many layers of few kinds.
    """

    embedding: Embedding
    kinds: tuple[Layer, ...]
    """The distinct layers, in order of first appearance."""
    order: tuple[int, ...]
    """Index in `kinds` of each layer."""
    head: Head | ValueHeadBlock
    max_length: int
    """Longest sequence in tokens (`max_position_embeddings`)."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    zero_centered_norms: bool = False
    """True if norms of hidden states, queries and keys multiply by 1 + weight."""

    prefix: str = MODEL
    """Beginning of the names of all tensors on disk but the output projection."""

    def __hash__(self) -> int:
        """Hashes what differs between models; a hash of every block would cost more than most cached results."""
        return hash((self.order, self.embedding, self.head))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.order)

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.embedding.hidden

    @property
    def vocab(self) -> int:
        """Number of tokens of the vocabulary, without padding."""
        return self.embedding.vocab

    @property
    def tied(self) -> bool:
        """True if the output projection is the embedding; False for a critic."""
        return self.head.tied

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The distinct blocks of all layers, in order of first appearance."""
        return tuple(dict.fromkeys(block for kind in self.kinds for block in kind))

    @property
    def parts(self) -> tuple[Block, ...]:
        """The embedding, `blocks`, and the head."""
        return (self.embedding, *self.blocks, self.head)

    @cached_property
    def facts(self) -> dict[str, int]:
        """Sizes of the blocks by name (`heads`, `kv_heads`, `experts`, …). A size in several blocks is the first
        block's."""
        sizes: dict[str, int] = {}
        for block in reversed(self.blocks):
            sizes |= block.facts()
        return sizes

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads; 0 for latent attention, and without attention blocks."""
        return self.facts.get("kv_heads", 0)

    @cached_property
    def experts(self) -> Experts | None:
        """The first block of routed experts; None for a dense model."""
        return next((block for block in self.blocks if isinstance(block, Experts)), None)

    @cached_property
    def moe_layers(self) -> frozenset[int]:
        """Indices, counted from 0 over the whole model, of the layers with routed experts."""
        kinds = {n for n, kind in enumerate(self.kinds) if any(isinstance(block, Experts) for block in kind)}
        return frozenset(index for index, kind in enumerate(self.order) if kind in kinds)

    def layer(self, index: int) -> Layer:
        """Returns the blocks of layer `index` (global, from 0), in execution order. A negative index counts from the
        end. Raises IndexError beyond the last layer."""
        return self.kinds[self.order[index]]

    @property
    def layer_blocks(self) -> Iterator[tuple[str, Block]]:
        """Every block of every layer, in execution order, with the beginning of the layer's tensor names, such as
        `model.layers.3`."""
        return ((f"{MODEL}.layers.{index}", block) for index in range(self.layers) for block in self.layer(index))

    @cached_property
    def float32_tensors(self) -> frozenset[str]:
        """Hugging Face names of the tensors that stay in float32 in a model of any dtype."""
        return frozenset(map(self.on_disk, self.float32_parameters))

    @cached_property
    def float32_parameters(self) -> frozenset[str]:
        """vLLM's names of `float32_tensors`, each a parameter of its own."""
        return frozenset(name for source, block in self.layer_blocks for name in block.float32_tensors(source))

    @cached_property
    def frozen_tensors(self) -> frozenset[str]:
        """Hugging Face names of the tensors among `float32_tensors` that are never trained."""
        names = (name for source, block in self.layer_blocks for name in block.frozen_tensors(source))
        return frozenset(map(self.on_disk, names))

    @cached_property
    def disk_forms(self) -> dict[str, DiskForm]:
        """Hugging Face name → order of axes on disk, of the tensors with another order in `huggingface.tensors`."""
        forms = (form for source, block in self.layer_blocks for form in block.disk_forms(source).items())
        return {self.on_disk(name): form for name, form in forms}

    @cached_property
    def engine_float32(self) -> frozenset[str]:
        """Names of the parameters that vLLM keeps in float32 in a model of any dtype."""
        return frozenset(name for source, block in self.layer_blocks for name in block.engine_float32(source))

    def on_disk(self, name: str) -> str:
        """Returns the name on disk of a tensor that a block declares: with `prefix` instead of `MODEL`."""
        return self.prefix + name.removeprefix(MODEL) if name.startswith(f"{MODEL}.") else name

    def is_moe(self, index: int) -> bool:
        """Returns True if layer `index` (global, from 0) contains routed experts; False also for an index without a
        layer."""
        return index in self.moe_layers

    def layer_counts(self, layers: Iterable[int] | None = None) -> list[tuple[Layer, int]]:
        """Returns every kind of layer among `layers`, with the number of these layers of the kind, in the order of
        `kinds`. Kinds without a layer are left out.

        Args:
            layers: Global indices, from 0; None for all layers of the model. An index given twice counts twice.
        """
        kinds = list(self.order) if layers is None else [self.order[index] for index in layers]
        return [(kind, kinds.count(index)) for index, kind in enumerate(self.kinds) if index in kinds]

    @cached_property
    def critic(self) -> Decoder:
        """The same model with a value head instead of the output projection."""
        return replace(self, head=ValueHeadBlock.of(self.hidden))

    def of_one_layer(self, kind: Layer) -> Decoder:
        """Returns a copy of the model with a single layer, of this kind."""
        return replace(self, kinds=(kind,), order=(0,))


def read_decoder(
    hf: Hf,
    layers: Sequence[Layer],
    *,
    engine_ties: bool = True,
    zero_centered_norms: bool = False,
    mxfp4: bool = False,
    engine_embedding: str = EMBEDDING,
) -> Decoder:
    """Returns the model with these layers, reading the config.json keys common to all families.

    Args:
        hf: Content of config.json, with the defaults of its family (`with_defaults`).
        layers: The blocks of every layer, in order.
        engine_ties: True if vLLM's class of the family can tie the output projection to the embedding.
        zero_centered_norms: Value of the field.
        mxfp4: True if the family is published in MXFP4, which is then read.
        engine_embedding: Name of the embedding in vLLM.

    Raises:
        UserError: A key is missing or not supported, or the checkpoint is quantised in an unsupported way.
    """
    check_quantisation(hf, in_mxfp4=mxfp4)
    distinct = {id(layer): layer for layer in layers}  # families repeat an object: cheaper to compare than its blocks
    kinds = tuple(dict.fromkeys(distinct.values()))
    position = {key: kinds.index(layer) for key, layer in distinct.items()}
    return Decoder(
        embedding=Embedding.read(hf, engine_embedding),
        kinds=kinds,
        order=tuple(position[id(layer)] for layer in layers),
        head=Head.read(hf, engine_ties),
        max_length=integer(hf, "max_position_embeddings"),
        norm_eps=number(hf, "rms_norm_eps"),
        zero_centered_norms=zero_centered_norms,
    )
