"""Scores compared with brute force, and errors compared with the binomial formula and a bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.evaluate.results import ScoredSample, row_of
from skyrl_mega.evaluate.scores import Score, SetScores, mean_over_examples, mean_over_sets, set_scores
from skyrl_mega.trajectories.trajectory import Status, Trajectory


def samples_of(rights: list[list[float]]) -> dict[tuple[int, int], ScoredSample]:
    """Returns samples by (prompt, sample): a reward of ±1, an accuracy of 0 or 1, an F1 in between."""
    return {
        (uid, n): ScoredSample(
            2 * right - 1, right, {"exact_match": right, "f1": right / 2}, Status.COMPLETED, 10 * n, 0
        )
        for uid, group in enumerate(rights)
        for n, right in enumerate(group)
    }


tables = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n), min_size=1, max_size=12)
)


@given(tables)
def test_scores_are_the_brute_forces(rights: list[list[float]]) -> None:
    scores = set_scores("s", samples_of(rights))
    array = np.array(rights)
    assert (scores.prompts, scores.samples) == array.shape
    assert scores.scores["accuracy"].value == pytest.approx(array.mean())
    assert scores.scores["reward"].value == pytest.approx((2 * array - 1).mean())
    assert scores.scores["f1"].value == pytest.approx(array.mean() / 2)
    assert scores.scores["pass"].value == pytest.approx(
        sum(any(r == 1 for r in group) for group in rights) / len(rights)
    )
    assert scores.tokens == pytest.approx(10 * np.arange(array.shape[1]).mean())
    assert "exact_match" not in scores.scores, "it is the accuracy"


def test_samples_whose_environment_failed_have_no_score() -> None:
    """Scores a prompt by the samples without failure; a prompt of failed samples does not count."""
    samples = samples_of([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    for key in ((0, 0), (3, 0), (3, 1)):
        samples[key] = samples[key]._replace(status=Status.ERROR_ENV, reward=0.0, accuracy=0.0, metrics={"f1": 0.0})
    scores = set_scores("s", samples)
    assert scores.scores["accuracy"].value == pytest.approx(0.5) and scores.scores["pass"].value == pytest.approx(2 / 3)
    assert (scores.prompts, scores.samples, scores.failed, scores.unjudged) == (4, 2, 3 / 8, 1)
    other = set_scores("t", samples_of([[0.0]]))
    over_examples = mean_over_examples([scores, other], "accuracy")
    assert over_examples is not None and over_examples.value == pytest.approx(1.5 / 4)
    lost = set_scores("u", {key: one._replace(status=Status.ERROR_ENV) for key, one in samples.items()})
    assert lost.scores == {} and lost.failed == 1
    assert mean_over_sets([scores, lost], "accuracy") is mean_over_examples([scores, lost], "accuracy") is None


def test_the_error_of_single_samples_is_the_binomial_one() -> None:
    rights = [[1.0]] * 30 + [[0.0]] * 70
    assert set_scores("s", samples_of(rights)).scores["accuracy"].error == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert set_scores("s", samples_of([[1.0]])).scores["accuracy"].error is None


def test_the_error_is_a_bootstraps_over_prompts() -> None:
    """Compares errors for prompts of different difficulty: samples of a prompt are alike, and treating them as
    independent would understate the error."""
    rng = np.random.default_rng(0)
    hard = rng.beta(0.3, 0.3, 400)
    rights = (rng.random((400, 8)) < hard[:, None]).astype(float)
    error = set_scores("s", samples_of(rights.tolist())).scores["accuracy"].error
    means = [rights[rng.integers(0, 400, 400)].mean() for _ in range(4000)]
    assert error == pytest.approx(np.std(means), rel=0.06)
    independent = math.sqrt(rights.mean() * (1 - rights.mean()) / rights.size)
    assert error is not None and error > 1.8 * independent


def test_both_means() -> None:
    def of(name: str, prompts: int, value: float, error: float | None, **more: Score) -> SetScores:
        return SetScores(name, prompts, 1, {"accuracy": Score(value, error), **more}, 0.0, 0.0, 0.0)

    sets = [of("a", 10, 0.2, 0.03, f1=Score(0.5, 0.1)), of("b", 30, 0.6, 0.04)]
    over_sets, over_examples = mean_over_sets(sets, "accuracy"), mean_over_examples(sets, "accuracy")
    assert over_sets == Score(pytest.approx(0.4), pytest.approx(0.025))
    assert over_examples == Score(pytest.approx(0.5), pytest.approx(math.hypot(10 * 0.03, 30 * 0.04) / 40))
    assert mean_over_sets(sets, "f1") == Score(0.5, pytest.approx(0.1))
    assert mean_over_sets(sets, "pass") is None
    assert mean_over_sets([*sets, of("c", 1, 1.0, None)], "accuracy") == Score(pytest.approx(0.6), None)


@pytest.mark.parametrize(
    "metrics, reward, metadata, accuracy",
    [
        ((), 1.0, {}, 1.0),
        ((), 0.2, {}, 0.0),  # a reward for the format is no right answer
        ((), -1.0, {}, 0.0),
        (("correct",), 0.2, {"correct": True}, 1.0),
        (("correct",), 1.0, {"correct": False}, 0.0),
        (("exact_match", "f1"), 0.5, {"exact_match": 0.0, "f1": 0.5}, 0.0),
        (("exact_match", "f1"), 0.0, {"error": "no answer was given"}, 0.0),
    ],
)
def test_accuracy_is_what_the_environment_says_or_a_reward_of_1(
    metrics: tuple[str, ...], reward: float, metadata: dict[str, object], accuracy: float
) -> None:
    prompt = Prompt(4, [{"role": "user", "content": "?"}], "e", {"data_source": "d"})
    t = Trajectory(prompt, 1, [1, 2, 3, 4], [0, 1, 0, 1], [0.0] * 4, 1, reward, Status.COMPLETED, 2, metadata=metadata)
    row = row_of(t, metrics)
    assert (row["accuracy"], row["reward"], row["response_tokens"], row["prompt_tokens"]) == (accuracy, reward, 2, 1)
