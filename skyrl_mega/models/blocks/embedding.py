"""The blocks before and after the layers: the token embedding; the last norm with the output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.base import (
    Block,
    Cut,
    EngineCut,
    MegatronPlace,
    MegatronSettings,
    Tensors,
    TokenFlops,
    Work,
)
from skyrl_mega.models.config_json import Hf, flag, integer
from skyrl_mega.models.shard_builder import ShardBuilder

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this number before splitting."""


@dataclass(frozen=True)
class Embedding(Block):
    """The token embedding, one row per token."""

    vocab: int
    hidden: int
    engine_name: str = EMBEDDING
    """Name of the parameter in vLLM."""

    @classmethod
    def read(cls, hf: Hf, engine_name: str = EMBEDDING) -> Embedding:
        """Returns the embedding described by config.json, with this name in vLLM.

        Raises:
            UserError: A size is missing or no positive integer.
        """
        return cls(integer(hf, "vocab_size"), integer(hf, "hidden_size"), engine_name)

    def hf_tensors(self, source: str) -> Tensors:
        return {EMBEDDING: (self.vocab, self.hidden)}

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        return MegatronSettings(gpt={"vocab_size": self.vocab})

    def megatron_cuts(self) -> Sequence[Cut]:
        return (Cut("tensor", "hidden size", self.hidden),)

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        rows = padded_vocab(self.vocab, place.parallel.tensor) // place.parallel.tensor
        param = b.param(f"{target}.embedding.word_embeddings.weight", rows, self.hidden)
        vocab_rows(b, param, EMBEDDING, place.coords.tp * rows, (rows, self.vocab))

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        return (("rows of the padded vocabulary", padded_vocab(self.vocab, VOCAB_MULTIPLE)),)

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        rows = padded_vocab(self.vocab, VOCAB_MULTIPLE) // cut.tensor
        param = b.param(self.engine_name, rows, self.hidden)
        vocab_rows(b, param, EMBEDDING, worker % cut.tensor * rows, (rows, self.vocab))

    def flops(self) -> TokenFlops:
        return TokenFlops(0.0)

    def saved_bytes(self, work: Work) -> float:
        return 0.0


@dataclass(frozen=True)
class Head(Block):
    """The last norm, and the output projection; the logits are counted in `planner.activations`."""

    vocab: int
    hidden: int
    tied: bool
    """True if the output projection is the embedding."""
    engine_ties: bool = True
    """True if vLLM's class of the family can tie the output projection to the embedding."""

    @classmethod
    def read(cls, hf: Hf, engine_ties: bool = True) -> Head:
        """Returns the head described by config.json.

        Raises:
            UserError: A key is missing, or a value is not supported.
        """
        tied = flag(hf, "tie_word_embeddings")
        return cls(integer(hf, "vocab_size"), integer(hf, "hidden_size"), tied, engine_ties)

    def hf_tensors(self, source: str) -> Tensors:
        """Returns name → shape of the tensors on disk: `model.norm.weight`, and `lm_head.weight` unless tied to the
        embedding. `source` is not used."""
        shapes: Tensors = {FINAL_NORM: (self.hidden,)}
        return shapes if self.tied else shapes | {HEAD: (self.vocab, self.hidden)}

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        return MegatronSettings(gpt={"share_embeddings_and_output_weights": self.tied})

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Adds a policy rank's parameters to `b`: the whole norm, and the rank's rows of the projection, padded with
        rows without pieces. A tied projection is left out on the embedding's chunk, and is a second copy of the
        embedding on another chunk."""
        b.whole(f"{target}.decoder.final_layernorm.weight", FINAL_NORM)
        if self.tied and place.first:
            return
        rows = padded_vocab(self.vocab, place.parallel.tensor) // place.parallel.tensor
        param = b.param(f"{target}.output_layer.weight", rows, self.hidden)
        vocab_rows(b, param, EMBEDDING if self.tied else HEAD, place.coords.tp * rows, (rows, self.vocab))

    def check_engine(self, cut: EngineCut, key: str) -> None:
        if self.tied and not self.engine_ties:
            raise UserError(
                "tie_word_embeddings is true, which vLLM ignores for this model_type: it would compute with a random "
                "output projection",
                key="config.json",
                fix="give false, and lm_head.weight in the files",
            )

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        b.whole(FINAL_NORM, FINAL_NORM)
        if not self.tied:
            rows = padded_vocab(self.vocab, VOCAB_MULTIPLE) // cut.tensor
            vocab_rows(b, b.param(HEAD, rows, self.hidden), HEAD, worker % cut.tensor * rows, (rows, self.vocab))

    def flops(self) -> TokenFlops:
        return TokenFlops(2 * self.vocab * self.hidden)

    def saved_bytes(self, work: Work) -> float:
        return 0.0


def padded_vocab(vocab: int, multiple: int) -> int:
    """Returns the number of tokens rounded up to a multiple of `multiple`: Megatron's tensor-parallel size, or vLLM's
    `VOCAB_MULTIPLE`. A multiple itself stays."""
    return -(-vocab // multiple) * multiple


def vocab_rows(b: ShardBuilder, param: str, tensor: str, start: int, sizes: tuple[int, int]) -> None:
    """Declares in `b` that a rank's parameter holds the rows of `tensor` from row `start` on. Padding rows, beyond the
    vocabulary, get no piece; perhaps all rows are padding.

    Args:
        b: Builder of the rank's shard.
        param: Local parameter, already declared (`ShardBuilder.param`).
        tensor: Embedding or output projection, a row per token.
        start: First row of the rank.
        sizes: (Rows of the parameter, tokens of the vocabulary).

    Raises:
        KeyError: `tensor` is unknown to `b`, and the rank has a row of it.
    """
    rows, vocab = sizes
    if start < vocab:
        b.rows(param, 0, tensor, start, min(rows, vocab - start))
