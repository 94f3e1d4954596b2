"""The KL penalty in the reward, compared with loops written as in the paper (arXiv:1909.08593)."""

from __future__ import annotations

import math
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.algorithms.advantages import needs
from skyrl_mega.algorithms.entropy import EntropyCoefficient
from skyrl_mega.algorithms.kl import adapted
from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.batch.advantages import has_gradient
from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.config.schema import AlgorithmConfig, Config, KlConfig, MoeConfig, RolloutConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.kl_reward import KlReward
from skyrl_mega.trainer.loop import train_on
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory
from tests.support.batches import make_batch, mini_batches, token_advantages
from tests.trainer.test_loop import Notes, group

STATUS = (Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED_TOKENS, Status.ERROR_ENV)


def algorithm_of(advantage: str, **kl: object) -> AlgorithmConfig:
    both = {"coefficient": 0.5, "where": "reward", "estimator": "k1", **kl}
    return AlgorithmConfig(advantage=advantage, normalize=False, kl=KlConfig(**both))  # type: ignore[arg-type]


def batch_of(seed: int, algorithm: AlgorithmConfig) -> tuple[list[Trajectory], Batch]:
    """Returns random trajectories of 2 prompt tokens and up to 4 answer tokens, and the batch with log-probs of both
    models."""
    rng = random.Random(seed)
    groups = []
    for number in range(3):
        trajectories = []
        for sample in range(rng.randint(1, 4)):
            answer_length, status = rng.randint(0, 4), rng.choice(STATUS)
            parts = (
                array("i", range(2 + answer_length)),
                array("b", [0, 0] + [1] * answer_length),
                array("f", [0.0] * (2 + answer_length)),
            )
            reward = 0.0 if status.failed else rng.choice([0.0, 0.5, 1.0])
            trajectories.append(Trajectory(Prompt(number, [], "m", {}), sample, *parts, 2, reward, status, 1))
        groups.append(Group(trajectories[0].prompt, trajectories))
    batch = make_batch(groups, algorithm, RolloutConfig())
    g = torch.Generator().manual_seed(seed)
    for name in ("old_logprobs", "reference_logprobs"):
        batch.tokens[name] = -torch.rand(len(batch.tokens.tokens), generator=g)
    return [t for group in groups for t in group.trajectories], batch


def distances(played: list[Trajectory], batch: Batch) -> list[list[float]]:
    """Returns log π - log π_ref of each trajectory's answer tokens."""
    by_trajectory, place = [], 0
    for t in played:
        each = [
            float(batch.tokens["old_logprobs"][place + i]) - float(batch.tokens["reference_logprobs"][place + i])
            for i in range(2, len(t.tokens))
        ]
        by_trajectory.append(each)
        place += len(t.tokens)
    return by_trajectory


def test_every_token_pays_for_its_distance() -> None:
    for seed in range(15):
        algorithm = algorithm_of("reinforce")
        played, batch = batch_of(seed, algorithm)
        metrics = KlReward(algorithm.kl).penalize(batch)
        far = distances(played, batch)
        judged = [i for i, t in enumerate(played) if not t.status.failed and any(t.mask)]
        if judged:
            assert metrics["policy/kl_reward"] == pytest.approx(
                sum(sum(far[i]) for i in judged) / len(judged), abs=1e-6
            )
        advantages, place = token_advantages(batch, algorithm), 0
        for t, each in zip(played, far, strict=True):
            expected = 0.0 if t.status.failed else t.reward - 0.5 * sum(each)
            assert advantages[place : place + len(t.tokens)].tolist() == pytest.approx(
                [expected] * len(t.tokens), abs=1e-6
            )
            place += len(t.tokens)


OWN = """
from skyrl_mega.algorithms.advantages import per_token

@per_token()
def rewards(inputs, algorithm):
    return inputs.token.rewards_T
"""


def test_by_token_each_pays_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    for seed in range(15):
        algorithm = algorithm_of(f"{tmp_path / 'own.py'}:rewards")
        assert needs(algorithm) == {"old_logprobs", "reference_logprobs"}
        played, batch = batch_of(seed, algorithm)
        KlReward(algorithm.kl).penalize(batch)
        advantages, place = token_advantages(batch, algorithm), 0
        for t, each in zip(played, distances(played, batch), strict=True):
            expected = [-0.5 * distance for distance in each]
            if expected:
                expected[-1] += t.reward
            expected = [0.0] * len(expected) if t.status.failed else expected
            assert advantages[place + 2 : place + len(t.tokens)].tolist() == pytest.approx(expected, abs=1e-6)
            place += len(t.tokens)


def far_from_reference(played: list[Trajectory], batch: Batch, estimator: str) -> list[float]:
    """Returns Σ k_t of each measured trajectory: k1 is log π - log π_ref, k3 is π_ref/π - 1 + k1."""
    sums = []
    for t, each in zip(played, distances(played, batch), strict=True):
        if not t.status.failed and each:
            sums.append(sum(distance if estimator == "k1" else math.exp(-distance) - 1 + distance for distance in each))
    return sums


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_coefficient_follows_the_target(estimator: str) -> None:
    algorithm = algorithm_of("reinforce", target=0.15, horizon=50, estimator=estimator)
    control = KlReward(algorithm.kl)
    beta, errors = 0.5, []
    for seed in range(40):
        played, batch = batch_of(seed, algorithm)
        metrics = control.penalize(batch)
        assert metrics["policy/kl_coefficient"] == pytest.approx(beta, rel=1e-5)
        if far := far_from_reference(played, batch, estimator):
            mean = sum(far) / len(far)
            assert metrics["policy/kl_reward"] == pytest.approx(mean, rel=1e-5, abs=1e-6)
            errors.append(mean / 0.15 - 1)
            beta *= 1 + min(max(errors[-1], -0.2), 0.2) * len(far) / 50
    assert any(abs(e) < 0.2 for e in errors) and min(errors) < -0.2 and max(errors) > 0.2
    assert control.coefficient == pytest.approx(beta, rel=1e-5) != 0.5
    again = KlReward(algorithm.kl)
    again.restore(control.state())
    assert again.coefficient == control.coefficient
    fixed = KlReward(algorithm_of("reinforce").kl)
    fixed.restore(control.state())
    assert fixed.state() == {} and fixed.coefficient == 0.5


def test_the_loss_has_no_term_and_a_step_learns_where_there_is_an_advantage() -> None:
    algorithm = algorithm_of("reinforce")
    _, batch = batch_of(3, algorithm)
    KlReward(algorithm.kl).penalize(batch)
    batch.tokens["advantages"] = torch.zeros(len(batch.tokens.tokens))
    (mini,) = mini_batches(batch, None, algorithm)
    assert algorithm.kl.in_loss == 0 and not has_gradient(batch.refs.counts, torch.zeros(1), algorithm, MoeConfig())
    shared = {
        "logprobs_L": batch.tokens["old_logprobs"],
        "old_L": batch.tokens["old_logprobs"],
        "weights_L": mini["weights"],
        "advantages_L": batch.tokens["old_logprobs"],
    }
    with_reference, _ = find("ppo")(LossInputs(**shared, reference_L=batch.tokens["reference_logprobs"]), algorithm)
    without, _ = find("ppo")(LossInputs(**shared), algorithm)
    assert with_reference == without != 0


def test_the_loop_measures_it_before_advantages() -> None:
    config, policy, step = Config(), Notes(), Step(1, Console())
    config.algorithm.kl = KlConfig(coefficient=0.1, where="reward", estimator="k1", target=0.5, horizon=10)
    reference = SimpleNamespace(
        keep_logprobs=lambda minis, **_: policy.calls.append(("reference", len(minis))), ranks=object()
    )
    run: Any = SimpleNamespace(config=config, policy=policy, reference=reference, critic=None, temperature=1.0)
    run.kl, run.entropy = KlReward(config.algorithm.kl), EntropyCoefficient(config.algorithm.entropy)
    train_on(run, step, [group(1.0, 0.0)])
    columns = [("column", "old_logprobs"), ("column", "reference_logprobs")]
    assert policy.calls[:5] == [("hold", 1), ("old_logprobs",), ("reference", 1), *columns]
    assert policy.calls[5][0] == "advantages"
    assert step.metrics["policy/kl_reward"] == 0 and run.kl.coefficient == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))


def test_what_the_loss_leaves_out_is_in_no_mean_and_a_critics_warm_up_moves_nothing() -> None:
    """Measures one of four trajectories with KL 4, equal to the target: the coefficient stays."""
    algorithm = algorithm_of("reinforce", target=4.0, horizon=10)
    algorithm.overlong.filter = True
    trajectories = []
    for sample in range(4):
        status = Status.TRUNCATED_TOKENS if sample else Status.COMPLETED
        parts = array("i", range(3)), array("b", [0, 1, 1]), array("f", [0.0] * 3)
        trajectories.append(Trajectory(Prompt(0, [], "m", {}), sample, *parts, 1, 1.0, status, 1))
    batch = make_batch([Group(trajectories[0].prompt, trajectories)], algorithm, RolloutConfig())
    batch.tokens["old_logprobs"] = torch.where(batch.tokens["mask"] != 0, 2.0, 0.0)
    batch.tokens["reference_logprobs"] = torch.zeros(12)
    reward = KlReward(algorithm.kl)
    assert reward.penalize(batch)["policy/kl_reward"] == pytest.approx(4.0) and reward.coefficient == 0.5
    batch.tokens["old_logprobs"] *= 2
    assert reward.penalize(batch, adapt=False) and reward.coefficient == 0.5
    assert reward.penalize(batch) and reward.coefficient == pytest.approx(0.5 * (1 + 0.2 * 1 / 10))


def test_the_coefficient_is_at_least_halved_and_at_most_doubled() -> None:
    reward = KlReward(KlConfig(coefficient=0.5, where="reward", target=1.0, horizon=1))
    assert adapted(0.5, 0.0, 100, reward.config) == 0.25 and adapted(0.5, 9.0, 100, reward.config) == 1.0
