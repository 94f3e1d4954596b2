"""Settings of the entropy bonus and of entropy-based token selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import Refusals, at_least, between


@dataclass
class EntropyConfig:
    """Entropy bonus: subtracts `coefficient` × the mean entropy of the policy's tokens, in nats, from the loss. Also
    selects the tokens of the policy loss (`top_share`)."""

    coefficient: float = at_least(0, 0.0)
    """Factor of the bonus; 0 is no bonus. With `target`, the factor of the first step. Published runs use 1e-4 to
    1e-2."""
    target: Optional[float] = at_least(0, None)
    """Target entropy in nats per token for an adaptive coefficient (Skywork-OR1, arXiv:2505.22312). After an RL step
    with entropy at most `target` the coefficient grows by `step`, otherwise the coefficient shrinks by `step`; while
    the entropy is above `target` the bonus is off. null keeps the coefficient fixed. Skywork-OR1 uses 0.2; a target
    below the entropy of the run has no effect."""
    step: float = at_least(0, 0.005)
    """Change of the coefficient per RL step; used with `target`."""
    least: float = at_least(0, 0.0)
    """Lower bound of the coefficient; used with `target`."""
    most: float = at_least(0, 1.0)
    """Upper bound of the coefficient; used with `target`."""
    top_share: float = between(0, 1, 1.0)
    """Share of the mini-batch's tokens in the policy loss, chosen by highest entropy before the step (arXiv:2506.01939
    uses 0.2). The remaining tokens count as 0 in the mean and keep the KL and entropy terms. 1 uses all tokens."""

    def refusals(self) -> Refusals:
        """Yields refusals of `top_share` 0; with a `target`, of a step size of 0, of `least` not below `most`, and of a
        coefficient outside of these."""
        key = "algorithm.entropy"
        if self.top_share == 0:
            yield (
                f"{key}.top_share",
                "no token would be learned from; allowed is a number above 0, up to 1 (all tokens)",
            )
        if self.target is None:
            return
        if self.step == 0:
            yield f"{key}.step", f"the coefficient would not adapt; allowed is more, or {key}.target=null"
        if self.least >= self.most:
            why = f"allowed is a number below {key}.most = {self.most:g}; between them the coefficient adapts"
            yield f"{key}.least", why
        if not self.least <= self.coefficient <= self.most:
            yield (
                f"{key}.coefficient",
                f"with {key}.target allowed is a number from {key}.least = {self.least:g} to {key}.most = "
                f"{self.most:g}",
            )
