"""What a critic has in the place of the output projection: the last norm, and one row that reads a value."""

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
"""As transformers names it in a model of one label (`…ForSequenceClassification`), such as a reward model."""
MEGATRON_VALUE = "value_head.weight"
"""What megatron-core's model calls it."""


@dataclass(frozen=True)
class ValueHead(Block):
    """The last norm, and a linear layer without bias from a hidden state to a value, which every tensor rank has."""

    hidden: int
    tied: bool = False
    """Never with the embedding."""

    @classmethod
    def of(cls, hidden: int) -> ValueHead:
        """Of a model of this width."""
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
