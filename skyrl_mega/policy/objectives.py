"""What a policy step minimises, bound to the fields that travel with the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from skyrl_mega.algorithms.losses import policy_loss
from skyrl_mega.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from skyrl_mega.policy.rank import Objective


def reinforcement(algorithm: AlgorithmConfig) -> Objective:
    """The policy loss; fields: weights, advantages, old_logprobs, rollout_logprobs and, with KL, reference_logprobs."""

    def objective(logprobs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return policy_loss(
            logprobs,
            old_logprobs_T=fields["old_logprobs"],
            advantages_T=fields["advantages"],
            weights_T=fields["weights"],
            algorithm=algorithm,
            rollout_logprobs_T=fields.get("rollout_logprobs"),
            reference_logprobs_T=fields.get("reference_logprobs"),
            entropy_T=entropy,
        )

    return objective


def supervised(logprobs: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the given tokens; field: weights."""
    weights = fields["weights"]
    loss = -(weights * logprobs).sum()
    return loss, {"loss": loss.detach(), "entropy": (weights * entropy).sum()}
