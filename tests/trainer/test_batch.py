"""From trajectories to training fields, against loops that read as the rule."""

from __future__ import annotations

import numpy as np
import pytest

from skyrl_mega.config.schema import AlgorithmConfig, KlConfig, OverlongConfig
from skyrl_mega.rollout.trajectory import Group, Prompt, Status, Trajectory
from skyrl_mega.trainer.batch import Batch, batch_of, mini_batches, not_drawn

PROMPT = Prompt(0, [{"role": "user", "content": "?"}], "gsm8k", {})


def trajectory(reward: float, response: int, status: Status = Status.COMPLETED, prompt: int = 3) -> Trajectory:
    tokens = list(range(prompt + response))
    mask = [0] * prompt + [1] * response
    return Trajectory(PROMPT, 0, tokens, mask, [-0.5 * m for m in mask], prompt, reward, status, 1)


def of_sequence(batch, name: str, row: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    start = batch.starts[row]
    return batch.fields[name][start : start + batch.lengths[row]]


def test_advantages_are_the_groups_own() -> None:
    """Two groups of one prompt (an epoch's end) stay two groups."""
    groups = [
        Group(PROMPT, [trajectory(1, 2), trajectory(0, 4)]),
        Group(PROMPT, [trajectory(1, 1), trajectory(1, 1), trajectory(0, 2)]),
    ]
    batch = batch_of(groups, AlgorithmConfig(normalize=False), 10)
    expected = [1 - 0.5, 0 - 0.5, 1 - 2 / 3, 1 - 2 / 3, 0 - 2 / 3]
    for row, value in enumerate(expected):
        np.testing.assert_allclose(of_sequence(batch, "advantages", row), value, rtol=1e-6)
    assert batch.fields["mask"].sum() == 10
    np.testing.assert_allclose(batch.fields["rollout_logprobs"], -0.5 * batch.fields["mask"])


def test_truncated_are_filtered_and_failed_count_for_nothing() -> None:
    truncated, failed = trajectory(0, 8, Status.TRUNCATED_TOKENS), trajectory(0, 3, Status.ERROR_ENV)
    group = Group(PROMPT, [trajectory(1, 2), truncated, failed, trajectory(0, 3)])
    batch = batch_of([group], AlgorithmConfig(normalize=False, overlong=OverlongConfig(filter=True)), 8)
    assert of_sequence(batch, "mask", 1).sum() == 0 and of_sequence(batch, "mask", 2).sum() == 0
    # The baseline is the mean of the three that the environment judged: (1 + 0 + 0) / 3.
    np.testing.assert_allclose(of_sequence(batch, "advantages", 0), 1 - 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(of_sequence(batch, "advantages", 2), 0)


def test_soft_overlong_punishment_lowers_the_reward() -> None:
    groups = [Group(PROMPT, [trajectory(1, 6), trajectory(1, 10)])]
    algorithm = AlgorithmConfig(normalize=False, overlong=OverlongConfig(buffer=4, penalty=1.0))
    batch = batch_of(groups, algorithm, 10)
    # 6 = 10 - 4 tokens are free; 10 tokens cost the whole penalty: rewards 1 and 0.
    np.testing.assert_allclose([of_sequence(batch, "advantages", r)[0] for r in (0, 1)], [0.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize("mode", ["tokens", "sequences", "micro_batches"])
def test_mini_batches_hold_whole_groups_and_weights_that_sum_to_one(mode: str) -> None:
    groups = [Group(PROMPT, [trajectory(g, 1 + g + s) for s in range(2)]) for g in range(5)]
    batch = batch_of(groups, AlgorithmConfig(), 10)
    parts = mini_batches(batch, 2, AlgorithmConfig(loss_mean=mode, loss_mean_samples=3))
    assert [len(p) for p in parts] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), batch.tokens)
    for part in parts:
        assert part.fields["weights"].sum() == pytest.approx(1, abs=1e-6)
        assert not part.fields["weights"][part.fields["mask"] == 0].any()


def test_the_kl_term_may_have_a_mean_of_its_own() -> None:
    groups = [Group(PROMPT, [trajectory(g, 1 + g + s) for s in range(2)]) for g in range(3)]
    batch = batch_of(groups, AlgorithmConfig(), 10)
    for mean, coefficient, there in (("sequences", 0.1, True), ("loss", 0.1, False), ("sequences", 0.0, False)):
        algorithm = AlgorithmConfig(kl=KlConfig(coefficient=coefficient, mean=mean))
        (mini,) = mini_batches(batch, 3, algorithm)
        assert ("kl_weights" in mini.fields) is there
    (mini,) = mini_batches(batch, 3, AlgorithmConfig(kl=KlConfig(coefficient=0.1, mean="sequences")))
    each = [mini.fields["kl_weights"][mini.index([row])].sum() for row in range(6)]
    np.testing.assert_allclose(each, 1 / 6, rtol=1e-6)


def test_only_an_end_token_that_no_engine_drew_counts_as_not_drawn() -> None:
    batch = Batch.of([[1, 2, 3], [4, 5]])
    batch.fields["rollout_logprobs"] = np.array([0, np.nan, np.nan, -1, np.nan], np.float32)
    assert not_drawn(batch, "one_message").tolist() == [False, False, True, False, True]
    assert not not_drawn(batch, "messages").any()
