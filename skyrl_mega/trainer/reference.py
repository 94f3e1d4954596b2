"""The frozen model that the policy's KL is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_mega.megatron.group import TrainGroup, tokens_of
from skyrl_mega.megatron.parts import Referred
from skyrl_mega.megatron.sequences import Sequences

COLUMN = "reference_logprobs"


@dataclass(frozen=True)
class ReferenceModel:
    """Weights beside the policy's on the same ranks, or ranks of its own in another layout."""

    policy: TrainGroup
    own: TrainGroup | None = None
    """Ranks of its own."""

    def keep_logprobs(self, minis: Sequence[Sequences | Referred], *, temperature: float) -> None:
        """Gives the policy's ranks its log-probs of the mini-batches that they hold, as a column.

        Args:
            minis: Those that the policy's ranks hold.
            temperature: Divides the logits.
        """
        if self.own is None:
            self.policy.keep_logprobs(COLUMN, temperature=temperature, reference=True)
            return
        self.own.hold(
            [Sequences(m.lengths, m.tokens, {"weights": m.columns["weights"]}) for m in map(tokens_of, minis)]
        )
        self.policy.add(COLUMN, self.own.logprobs(temperature=temperature))
