"""What parts of an answer earned, at the tokens that complete them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from skyrl_mega.rollout.trajectory import Trajectory

TOKEN_REWARDS = "token_rewards"
"""The column: float64 [T], what each token of the policy earned beside the rest of its answer's reward. Only there
where an environment gives `rewards_at`; the step's reward includes it."""
UNKNOWN, BYTES = "\ufffd", 4
"""What a part of a character reads as, and how many bytes one has at most."""
Text = Callable[[Sequence[int]], str]
"""`Renderer.text`."""


class TokenRewards:
    """Those of one trajectory, as far as it is played."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []
        """(position in `Trajectory.tokens`, reward)."""

    def add(self, t: Trajectory, text: Text, rewards_at: Sequence[tuple[int, float]]) -> None:
        """Adds those of the answer that the trajectory ends with."""
        start = t.steps[-1].start
        ends = characters(t.tokens[start:], text)
        self.found += [(start + min(bisect_left(ends, end), len(ends) - 1), reward) for end, reward in rewards_at]

    def keep(self, t: Trajectory) -> None:
        """Puts them into the trajectory's columns, once it is played."""
        if self.found and not t.status.failed:
            import torch  # which readers of trajectories do without

            from skyrl_mega.megatron.sequences import Column

            at, rewards = zip(*self.found, strict=True)
            values = torch.zeros(len(t.tokens), dtype=torch.float64)
            values.index_add_(0, torch.tensor(at), torch.tensor(rewards, dtype=torch.float64))
            t.columns[TOKEN_REWARDS] = Column(values, "target")


def characters(tokens: Sequence[int], text: Text) -> list[int]:
    """How many characters of an answer's text are complete with each of its tokens.

    A token is read with the one before it, as one at the beginning of a text may lose its space, and with those after
    it, as long as they may be bytes of one character: a part of one reads as U+FFFD.

    Args:
        tokens: Of one answer.
        text: Tokens → text.
    """
    found: list[int] = []
    before = first = done = 0
    for count in range(1, len(tokens) + 1):
        known, more = text(tokens[before:first]), text(tokens[before:count])
        if not more.endswith(UNKNOWN) or count - first >= BYTES:
            done += len(more) - len(known)
            before, first = first, count
        found.append(done)
    whole = len(text(tokens))
    return [*(min(whole, count) for count in found[:-1]), whole]
