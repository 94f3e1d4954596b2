"""KL terms of other programs, in the loss and in the reward. A run of this project supports a single KL term, so only
one of both is translated, with all its settings."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.migrate.state import TranslationState


@dataclass(frozen=True)
class Term:
    """The keys of another program for its KL term in the loss, or in the reward."""

    switch: str
    """Key to turn the term on; equal to `coefficient` in a program without a switch."""
    coefficient: str
    """Key of the factor."""
    more: tuple[str, ...] = ()
    """Further keys without a use in the other term."""

    def on(self, t: TranslationState) -> bool:
        """Returns True if the given settings turn the term on, with a coefficient other than 0 or an unknown one."""
        unknown = self.coefficient in t.given and bool(t.given[self.coefficient].unresolved)
        return bool(t.theirs(self.switch)) and (unknown or t.theirs(self.coefficient) not in (None, 0))


VERL, CONTROL, SKYRL = "actor_rollout_ref.actor", "algorithm.kl_ctrl", "trainer.algorithm"
TERMS = {
    "verl": (
        Term(f"{VERL}.use_kl_loss", f"{VERL}.kl_loss_coef", (f"{VERL}.kl_loss_coef", f"{VERL}.kl_loss_type")),
        Term(
            "algorithm.use_kl_in_reward",
            f"{CONTROL}.kl_coef",
            ("algorithm.kl_penalty", *(f"{CONTROL}.{name}" for name in ("kl_coef", "type", "target_kl", "horizon"))),
        ),
    ),
    "slime": (
        Term("--use-kl-loss", "--kl-loss-coef", ("--kl-loss-coef", "--kl-loss-type")),
        Term("--kl-coef", "--kl-coef"),
    ),
    "SkyRL": (
        Term(f"{SKYRL}.use_kl_loss", f"{SKYRL}.kl_loss_coef"),
        Term(f"{SKYRL}.use_kl_in_reward", f"{SKYRL}.kl_loss_coef"),
    ),
}
"""Program → (term in the loss, term in the reward)."""


def left_out(t: TranslationState, key: str) -> str:
    """Returns the reason to drop a key of a KL term, because the other term is translated; empty for other keys."""
    if t.program not in TERMS:
        return ""
    loss, reward = TERMS[t.program]
    if not reward.on(t):
        return ""
    if loss.on(t):
        why = f"a run has one KL term here: that of the loss is taken whole ({loss.switch}), this one is left out"
        return why if key in (reward.switch, *reward.more) else ""
    return (
        f"off there; the KL term in the reward is taken ({reward.switch})" if key in (loss.switch, *loss.more) else ""
    )
