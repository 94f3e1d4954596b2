"""The staleness of a step's tokens, and the limit."""

from __future__ import annotations

from array import array

import pytest

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trainer.rollouts_ahead import StaleTooFar, Versions
from skyrl_mega.trajectories.trajectory import Status, Trajectory


def drawn(*versions: tuple[int, int]) -> Trajectory:
    """Returns a trajectory of one prompt token and six policy tokens."""
    parts = array("i", range(7)), array("b", [0] + [1] * 6), array("f", [0.0] * 7)
    t = Trajectory(Prompt(0, [], "mine", {}), 0, *parts, 1, 1.0, Status.COMPLETED, 1)
    t.versions = list(versions)
    return t


def test_staleness_counts_syncs_of_tokens() -> None:
    """Measures staleness in syncs: version 4 had no sync, so 2 is two syncs behind 5. Four tokens are of 2, two of 3,
    six of 5."""
    versions = Versions(2)
    for version in (1, 2, 3, 5):
        versions.add(version)
    figures = versions.measure([drawn((2, 1), (3, 5)), drawn((5, 1))])
    assert figures == {"asynchrony/staleness_mean": (4 * 2 + 2 * 1) / 12, "asynchrony/staleness_max": 2.0}


@pytest.mark.parametrize("oldest", [1, 2, 3])
def test_a_token_that_is_too_old_ends_the_run(oldest: int) -> None:
    versions = Versions(2)
    for version in range(1, 6):
        versions.add(version)
    if oldest == 3:
        versions.measure([drawn((oldest, 1), (5, 6))])
        return
    with pytest.raises(StaleTooFar, match=f"weights that are {5 - oldest} syncs old"):
        versions.measure([drawn((oldest, 6))])
