"""Numbers of the policy's tokens, for masks of every type."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trajectories.trajectory import new_trajectory

MASK = [0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    "mask",
    [
        array("b", MASK),
        array("i", MASK),
        np.array(MASK, np.int64),
        np.array(MASK, np.bool_),
        np.array([*MASK, 0, 0])[:-2],
        torch.tensor(MASK),
        bytes(MASK),
        bytearray(MASK),
        MASK,
        tuple(MASK),
    ],
    ids=lambda mask: f"{type(mask).__name__}-{getattr(mask, 'typecode', getattr(mask, 'dtype', ''))}",
)
def test_tokens_of_the_policy_are_counted_by_value(mask: Any) -> None:
    trajectory = new_trajectory(Prompt(0, [], "multiply", {}), 0)
    trajectory.tokens, trajectory.mask = array("i", range(len(MASK))), mask
    trajectory.versions = [(1, 0), (2, 3), (3, 3), (4, 5)]
    assert trajectory.written == 3
    assert trajectory.tokens_by_version() == [1, 0, 1, 1]


def test_an_empty_trajectory_has_no_tokens() -> None:
    assert new_trajectory(Prompt(0, [], "multiply", {}), 0).written == 0
