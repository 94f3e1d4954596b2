"""The end of a critic instead of the output projection: the last norm, and a row to compute a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_mega.models.blocks.base import (
    Block,
    EngineCut,
    MegatronPlace,
    MegatronSettings,
    Tensors,
    TokenFlops,
    Work,
)
from skyrl_mega.models.blocks.embedding import FINAL_NORM
from skyrl_mega.models.shard_builder import ShardBuilder

VALUE = "score.weight"
"""Name in transformers' models with one label (`…ForSequenceClassification`), such as a reward model."""
MEGATRON_VALUE = "value_head.weight"
"""Name in megatron-core's model."""


@dataclass(frozen=True)
class ValueHeadBlock(Block):
    """The last norm, and a linear layer without bias from hidden state to value, replicated on every tensor rank."""

    hidden: int
    tied: bool = False
    """Always False: the value head never shares weights with the embedding."""

    @classmethod
    def of(cls, hidden: int) -> ValueHeadBlock:
        """Returns the value head for a model of width `hidden`."""
        return cls(hidden)

    def hf_tensors(self, source: str) -> Tensors:
        return {FINAL_NORM: (self.hidden,), VALUE: (1, self.hidden)}

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        return MegatronSettings(gpt={"share_embeddings_and_output_weights": False})

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        b.whole(f"{target}.decoder.final_layernorm.weight", FINAL_NORM)
        b.whole(f"{target}.{MEGATRON_VALUE}", VALUE)

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        raise ValueError("no engine runs a critic")

    def flops(self) -> TokenFlops:
        return TokenFlops(2 * self.hidden)

    def saved_bytes(self, work: Work) -> float:
        return 0.0
