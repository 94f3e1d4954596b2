"""Measures of the learning signal in a step's rewards. Pure functions.

A group of samples with equal rewards has zero advantages and only dilutes the batch. Dynamic sampling (DAPO,
arXiv:2503.14476, equation 11: 0 < number of correct samples < n) draws further prompts until the batch is full of
groups with different rewards, as given by the environment: length shaping would make equal answers differ. A sample
with a failed environment has no comparable reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch

from skyrl_mega.algorithms.advantages.base import LEAST, ROUNDING, check_finite
from skyrl_mega.batch.rewards import Turns, rewards_by_name
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.trajectories.trajectory import Trajectory


def rewards_differ(rewards: Sequence[Sequence[float]], tolerance: float = 0.0) -> bool:
    """Returns True if the trajectories of a group have a learning signal: in at least one of the lists, the highest
    reward exceeds the lowest by more than the tolerance and rounding.

    Args:
        rewards: Lists of rewards to compare, from `compared_rewards`; empty lists are ignored. Without any rewards the
            result is False.
        tolerance: Largest difference between highest and lowest that still counts as equal.

    Raises:
        ValueError: A reward is NaN or infinite.
    """
    return any(_differ(each, tolerance) for each in rewards if each)


def _differ(rewards: Sequence[float], tolerance: float) -> bool:
    highest, lowest = max(rewards), min(rewards)
    if not all(map(math.isfinite, rewards)):
        check_finite(torch.tensor(rewards, dtype=torch.float64))
    return highest - lowest - tolerance > max(ROUNDING * max(abs(highest), abs(lowest)), LEAST)


def compared_rewards(judged: Sequence[Trajectory], algorithm: AlgorithmConfig) -> list[list[float]]:
    """Returns the lists of rewards that the estimator of advantages compares among the trajectories of a prompt, for
    `rewards_differ`. `algorithm.advantage_traits.compares` decides:

    - `named`: a list per named reward with a nonzero weight; without any named reward as for other values.
    - `turns`: a list per turn, of the answers' rewards. A missing answer counts as the mean of all answers.
    - `returns`: a list per turn, of the rewards from this turn on, summed; only trajectories that answer in this turn.
    - another value: a single list of the trajectories' rewards.

    Args:
        judged: The prompt's trajectories without failure of the environment. Without any, no list has an entry.
        algorithm: The settings.
    """
    weights, compares = algorithm.reward_weights, algorithm.advantage_traits.compares
    if compares == "named" and (named := rewards_by_name(judged, weights)):
        return [rewards for name, rewards in named.items() if weights.get(name, 1.0)]
    if compares in ("turns", "returns"):
        turns = Turns.of(list(judged))
        each = turns.rewards.split(turns.answers.tolist())
        if compares == "turns":
            mean = float(turns.rewards.mean()) if len(turns.rewards) else 0.0
            return [list(turn) for turn in zip_longest(*(part.tolist() for part in each), fillvalue=mean)]
        later = [part.flip(0).cumsum(0).flip(0).tolist() for part in each]
        return [[one for one in turn if one is not None] for turn in zip_longest(*later)]
    return [[t.reward for t in judged]]


def rounded_reward(reward: float) -> float:
    """Returns a reward rounded to six significant digits, or 0 for magnitudes up to 1e-9; for counting equal
    rewards."""
    return 0.0 if abs(reward) <= LEAST else float(f"{reward:.6g}")
