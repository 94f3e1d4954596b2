"""A run whose environments all fail ends; a single one that works keeps it going."""

from __future__ import annotations

import pytest

from skyrl_mega.config.errors import UserError
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.trajectory import Status, Trajectory
from skyrl_mega.trainer.health.failures import refuse_broken


def ended(status: Status) -> Trajectory:
    error = {"error": "MyEnv.step raised NameError(\"name 're' is not defined\")"} if status.failed else {}
    return Trajectory(Prompt(0, [], "mine", {}), 0, [], [], [], 0, 0.0, status, 1, metadata=error)


def test_all_failed_is_one_line_with_the_first_cause() -> None:
    with pytest.raises(
        UserError, match=r"environment mine: all 2 .*name 're' is not defined.*environment\.classes\.mine"
    ):
        refuse_broken([ended(Status.ERROR_ENV), ended(Status.ERROR_ENV_TIMEOUT)])


def test_one_that_works_is_enough() -> None:
    refuse_broken([ended(Status.ERROR_ENV), ended(Status.TRUNCATED_TURNS)])
    refuse_broken([])
