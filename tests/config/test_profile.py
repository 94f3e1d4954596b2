"""Settings of the profiler: steps and ranks to record."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose

FILE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_steps_and_ranks_that_there_are() -> None:
    config = compose(FILE, ["telemetry.profile.steps=[3,100]", "telemetry.profile.ranks=[1,0]"])
    check(config)
    assert (config.telemetry.profile.steps, config.telemetry.profile.ranks) == ([3, 100], [1, 0])
    check(compose(FILE, ["telemetry.profile.ranks=[]", "telemetry.profile.steps=[1]"]))


def test_ranks_without_a_step_are_refused() -> None:
    with pytest.raises(UserError, match=r"ranks = \[0, 1\]: no step is recorded; give telemetry\.profile\.steps"):
        check(compose(FILE, ["telemetry.profile.ranks=[0,1]"]))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("steps=[0]", "telemetry.profile.steps = [0]: allowed is a list of whole numbers, each of at least 1"),
        ("steps=[1.5]", "telemetry.profile.steps = [1.5]: allowed is a list of whole numbers"),
        ("steps=[first]", "telemetry.profile.steps = [first]: allowed is a list of whole numbers"),
        ("steps=3", "telemetry.profile.steps = 3: allowed is a list of whole numbers"),
        ("steps=[2,2]", "2 is listed twice; give it once"),
        ("steps=[101]", "there is no step 101; allowed are 1 to 100 (run.steps)"),
        ("ranks=[-1]", "telemetry.profile.ranks = [-1]: allowed is a list of whole numbers, each of at least 0"),
        ("ranks=[2]", "there is no policy rank 2; allowed are 0 to 1 (policy.ranks)"),
    ],
)
def test_others_are_refused_by_name(settings: str, told: str) -> None:
    steps = [] if settings.startswith("steps") else ["telemetry.profile.steps=[1]"]
    with pytest.raises(UserError) as refused:
        check(compose(FILE, [f"telemetry.profile.{settings}", *steps]))
    assert told in str(refused.value)
