"""A decoder-only transformer as blocks: the embedding, the blocks of every layer, the head.

A family (`families/`) reads it from config.json; what depends on a block is asked of the block (`blocks/base.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from skyrl_mega.models.blocks.base import Block
from skyrl_mega.models.blocks.embedding import Embedding, Head
from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.blocks.value_head import ValueHead
from skyrl_mega.models.config_json import Hf, integer, number, unsupported

Layer = tuple[Block, ...]
"""The blocks of one layer, in the order in which a token goes through them."""


@dataclass(frozen=True)
class Decoder:
    """The blocks of a model, and what they have in common.

    Layers are kept by kind, since models have many layers of few kinds.
    """

    embedding: Embedding
    kinds: tuple[Layer, ...]
    """The layers that differ, in the order of their first appearance."""
    order: tuple[int, ...]
    """The kind of each layer."""
    head: Head | ValueHead
    max_length: int
    norm_eps: float

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.order)

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.embedding.hidden

    @property
    def vocab(self) -> int:
        """Tokens, without padding."""
        return self.embedding.vocab

    @property
    def tied(self) -> bool:
        """The output projection is the embedding."""
        return self.head.tied

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those that differ, of all layers, in the order of their first appearance."""
        return tuple(dict.fromkeys(block for kind in self.kinds for block in kind))

    @property
    def parts(self) -> tuple[Block, ...]:
        """`blocks` with the embedding before and the head after them."""
        return (self.embedding, *self.blocks, self.head)

    @property
    def facts(self) -> dict[str, int]:
        """Sizes of the blocks by name (`heads`, `kv_heads`, `experts`, …); of the first block that has the name."""
        found: dict[str, int] = {}
        for block in reversed(self.blocks):
            found |= block.facts()
        return found

    @property
    def heads(self) -> int:
        """Query heads; 0 where no block has any."""
        return self.facts.get("heads", 0)

    @property
    def kv_heads(self) -> int:
        """Key and value heads; 0 where no block has any."""
        return self.facts.get("kv_heads", 0)

    @property
    def head_dim(self) -> int:
        """Width of a head; 0 where no block has any."""
        return self.facts.get("head_dim", 0)

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias."""
        return bool(self.facts.get("qkv_bias"))

    @property
    def experts(self) -> Experts | None:
        """The routed experts, where the model has some."""
        return next((block for block in self.blocks if isinstance(block, Experts)), None)

    def layer(self, index: int) -> Layer:
        """The blocks of layer `index` (global)."""
        return self.kinds[self.order[index]]

    def is_moe(self, index: int) -> bool:
        """Whether layer `index` (global) has routed experts."""
        return any(isinstance(block, Experts) for block in self.layer(index))

    def counted(self, layers: Iterable[int] | None = None) -> list[tuple[Layer, int]]:
        """Every kind among `layers` (None: all of them), and how many of these are of it."""
        kinds = list(self.order) if layers is None else [self.order[index] for index in layers]
        return [(kind, kinds.count(number)) for number, kind in enumerate(self.kinds) if number in kinds]

    @property
    def critic(self) -> Decoder:
        """The same with a value head in the place of the output projection."""
        return replace(self, head=ValueHead.of(self.hidden))

    def of_one_layer(self, kind: Layer) -> Decoder:
        """The model with one layer of this kind instead of all its layers."""
        return replace(self, kinds=(kind,), order=(0,))


def read_decoder(hf: Hf, layers: Sequence[Layer]) -> Decoder:
    """The model of these layers, with the keys of config.json that all families have.

    Raises:
        UserError: a key is missing or asks for something that is not supported.
    """
    if hf.get("quantization_config"):
        raise unsupported(hf, "quantization_config", "a checkpoint without quantisation")
    kinds = tuple(dict.fromkeys(layers))
    return Decoder(
        embedding=Embedding.read(hf),
        kinds=kinds,
        order=tuple(kinds.index(layer) for layer in layers),
        head=Head.read(hf),
        max_length=integer(hf, "max_position_embeddings"),
        norm_eps=number(hf, "rms_norm_eps"),
    )
