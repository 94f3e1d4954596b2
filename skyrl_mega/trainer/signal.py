"""What there is to learn from in a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from skyrl_mega.algorithms.advantages.base import LEAST
from skyrl_mega.algorithms.filters import informative_groups
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.batch import Batch
from skyrl_mega.trainer.rewards import by_name
from skyrl_mega.trainer.turns import Turns


def with_advantage(batch: Batch) -> float:
    """Share of the tokens in the loss whose advantage is not 0; 0 without a token.

    Args:
        batch: With the columns `mask` and `advantages`.
    """
    counts = batch["mask"] != 0
    return float((counts & (batch["advantages"] != 0)).sum()) / max(1, int(counts.sum()))


def differ(rewards: Sequence[Sequence[float]], tolerance: float = 0.0) -> bool:
    """Whether trajectories earned rewards that differ, by more than rounding, as advantages compare them.

    Args:
        rewards: For each of what is compared, one of each trajectory.
        tolerance: Those that differ by no more are the same.
    """
    return any(
        bool(informative_groups(torch.tensor([each], dtype=torch.float64), tolerance=tolerance))
        for each in rewards
        if each
    )


def compared(judged: Sequence[Trajectory], algorithm: AlgorithmConfig) -> list[list[float]]:
    """What the estimator compares of a prompt's trajectories whose environments did not fail, as `differ` takes it.

    gdpo: each reward that has a name and a weight. grpo_turns: the answers' rewards, turn by turn; an answer that was
    not given is one that earned the mean of all, whose advantage is 0. optimal_token_baseline: what was earned from an
    answer on, of the trajectories that have one in that turn. All others: the trajectories' rewards.
    """
    weights = algorithm.reward_weights
    if algorithm.advantage == "gdpo" and (named := by_name(judged, weights)):
        return [rewards for name, rewards in named.items() if weights.get(name, 1.0)]
    if algorithm.advantage in ("grpo_turns", "optimal_token_baseline"):
        turns = Turns.of(list(judged))
        each = turns.rewards.split(turns.answers.tolist())
        if algorithm.advantage == "grpo_turns":
            mean = float(turns.rewards.mean()) if len(turns.rewards) else 0.0
            return [list(turn) for turn in zip_longest(*(part.tolist() for part in each), fillvalue=mean)]
        later = [part.flip(0).cumsum(0).flip(0).tolist() for part in each]
        return [[one for one in turn if one is not None] for turn in zip_longest(*later)]
    return [[t.reward for t in judged]]


def as_compared(reward: float) -> float:
    """A reward in six digits, without what rounding leaves of it, for counts of those that are the same."""
    return 0.0 if abs(reward) <= LEAST else float(f"{reward:.6g}")
