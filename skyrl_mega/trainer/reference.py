"""The frozen reference model for the policy's KL term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_mega.batch.samples import Samples
from skyrl_mega.megatron.group import TrainGroup

COLUMN = "reference_logprobs"


@dataclass(frozen=True)
class ReferenceModel:
    """Reference weights on the policy's ranks, or on separate ranks in another layout."""

    policy: TrainGroup
    ranks: TrainGroup | None = None
    """Separate ranks of the reference; None on the policy's ranks."""

    def keep_logprobs(self, minis: Sequence[Samples], *, temperature: float) -> None:
        """Computes the reference's log-probs of the mini-batches and stores the log-probs on the policy's ranks as the
        column `COLUMN`.

        Args:
            minis: The mini-batches currently on the policy's ranks.
            temperature: Divides the logits.

        Raises:
            ActorFailed: A rank failed.
        """
        if self.ranks is None:
            self.policy.keep_logprobs(COLUMN, temperature=temperature, reference=True)
            return
        self.ranks.hold([mini.with_weights_only() for mini in minis])
        self.policy.add(COLUMN, self.ranks.logprobs(temperature=temperature))
