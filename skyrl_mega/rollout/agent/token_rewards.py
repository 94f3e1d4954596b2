"""Rewards for parts of an answer, placed at the tokens that complete the parts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from skyrl_mega.trajectories.trajectory import TOKEN_REWARDS, Trajectory

UNKNOWN, BYTES = "\ufffd", 4
"""Text of an incomplete character, and most bytes of a character."""
Text = Callable[[Sequence[int]], str]
"""Type of `Renderer.text`."""


class TokenRewards:
    """Collector of a trajectory's rewards for parts of answers, turn by turn."""

    def __init__(self) -> None:
        self.rewards: list[tuple[int, float]] = []
        """(position in `Trajectory.tokens`, reward)."""

    def copied(self) -> TokenRewards:
        """Returns a copy with the rewards so far; later changes of one do not change the other."""
        copy = TokenRewards()
        copy.rewards = [*self.rewards]
        return copy

    def add(self, t: Trajectory, text: Text, rewards_at: Sequence[tuple[int, float]]) -> None:
        """Adds the rewards of the trajectory's last answer, each at the token that completes the rewarded part.

        Args:
            t: The trajectory, whose last step is the answer, with at least one token.
            text: Decodes tokens.
            rewards_at: Pairs (number of the answer's characters up to the end of the rewarded part, reward). An end
                behind the answer means the last token.
        """
        start = t.steps[-1].start
        ends = characters(t.tokens[start:], text)
        self.rewards += [(start + min(bisect_left(ends, end), len(ends) - 1), reward) for end, reward in rewards_at]

    def keep(self, t: Trajectory) -> None:
        """Stores the rewards of a finished trajectory as its column `TOKEN_REWARDS`, float64 [T], 0 for all other
        tokens; rewards at the same token are added up. Does nothing without rewards, or if the trajectory failed."""
        if self.rewards and not t.status.failed:
            import torch  # which readers of trajectories do without

            from skyrl_mega.trajectories.sequences import Column

            at, rewards = zip(*self.rewards, strict=True)
            values = torch.zeros(len(t.tokens), dtype=torch.float64)
            values.index_add_(0, torch.tensor(at), torch.tensor(rewards, dtype=torch.float64))
            t.columns[TOKEN_REWARDS] = Column(values, "target")


def characters(tokens: Sequence[int], text: Text) -> list[int]:
    """Returns for each token the number of characters of the answer's text complete up to and including that token.

    A token is decoded together with the token before, because the first token of a text may lose a leading space, and
    with later tokens as long as these may be bytes of the same character: an incomplete character decodes to U+FFFD.

    Args:
        tokens: Tokens of an answer; not empty.
        text: Decodes tokens.
    """
    counts: list[int] = []
    before = first = done = 0
    for count in range(1, len(tokens) + 1):
        known, more = text(tokens[before:first]), text(tokens[before:count])
        if not more.endswith(UNKNOWN) or count - first >= BYTES:
            done += len(more) - len(known)
            before, first = first, count
        counts.append(done)
    whole = len(text(tokens))
    return [*(min(whole, count) for count in counts[:-1]), whole]
