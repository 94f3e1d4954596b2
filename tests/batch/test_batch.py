"""Training fields made from trajectories, compared with plain loops."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.batch.samples import read_samples
from skyrl_mega.config.schema import AlgorithmConfig, KlConfig, MoeConfig, OverlongConfig, RolloutConfig
from skyrl_mega.trajectories.sequences import Column
from skyrl_mega.trajectories.trajectory import Group, Kind, Prompt, Status, Trajectory, TrajectoryStep
from tests.support.batches import make_batch, mini_batches, teaches, token_advantages

PROMPT = Prompt(0, [{"role": "user", "content": "?"}], "gsm8k", {})


def trajectory(reward: float, response: int, status: Status = Status.COMPLETED, prompt: int = 3) -> Trajectory:
    tokens = list(range(prompt + response))
    mask = [0] * prompt + [1] * response
    logprobs = array("f", [-0.5 * m for m in mask])
    return Trajectory(PROMPT, 0, array("i", tokens), array("b", mask), logprobs, prompt, reward, status, 1)


def of_sequence(batch: Batch, name: str, row: int) -> np.ndarray:
    return batch.tokens.part(row, row + 1)[name].numpy()


def batch_of(groups: list[list[Trajectory]], algorithm: AlgorithmConfig, response: int) -> Batch:
    """Returns the batch of `groups` with advantages; `response` is `rollout.max_response_tokens`."""
    rollout = RolloutConfig(max_response_tokens=response)
    batch = make_batch([Group(group[0].prompt, group) for group in groups], algorithm, rollout)
    batch.tokens["advantages"] = token_advantages(batch, algorithm)
    return batch


def test_advantages_are_the_groups_own() -> None:
    """Computes the advantages of two groups with the same prompt (as at an epoch's end) separately."""
    groups = [[trajectory(1, 2), trajectory(0, 4)], [trajectory(1, 1), trajectory(1, 1), trajectory(0, 2)]]
    batch = batch_of(groups, AlgorithmConfig(normalize=False), 10)
    expected = [1 - 0.5, 0 - 0.5, 1 - 2 / 3, 1 - 2 / 3, 0 - 2 / 3]
    for row, value in enumerate(expected):
        np.testing.assert_allclose(of_sequence(batch, "advantages", row), value, rtol=1e-6)
    assert batch.tokens["mask"].sum() == 10
    assert batch.written.tolist() == [2, 4, 1, 1, 2]
    np.testing.assert_allclose(batch.tokens["rollout_logprobs"], -0.5 * batch.tokens["mask"])


def test_truncated_are_filtered_and_failed_count_for_nothing() -> None:
    groups = [
        [
            trajectory(1, 2),
            trajectory(0, 8, Status.TRUNCATED_TOKENS),
            trajectory(0, 3, Status.ERROR_ENV),
            trajectory(0, 3),
        ]
    ]
    batch = batch_of(groups, AlgorithmConfig(normalize=False, overlong=OverlongConfig(filter=True)), 8)
    assert of_sequence(batch, "mask", 1).sum() == 0 and of_sequence(batch, "mask", 2).sum() == 0
    # The baseline is the mean of the three judged trajectories: (1 + 0 + 0) / 3.
    np.testing.assert_allclose(of_sequence(batch, "advantages", 0), 1 - 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(of_sequence(batch, "advantages", 2), 0)


@pytest.mark.parametrize(
    ("by", "left_out"),
    [
        ("budgets", {Status.TRUNCATED_TOKENS, Status.TRUNCATED_TURNS, Status.TRUNCATED_TIME}),
        ("tokens", {Status.TRUNCATED_TOKENS}),
    ],
)
def test_the_overlong_filter_takes_out_what_its_budgets_ended(by: str, left_out: set[Status]) -> None:
    groups = [[trajectory(i % 2, 3, status) for i, status in enumerate(Status)]]
    batch = batch_of(groups, AlgorithmConfig(overlong=OverlongConfig(filter=True, filter_by=by)), 8)
    for row, status in enumerate(Status):
        counts = not status.failed and status not in left_out
        assert of_sequence(batch, "mask", row).sum() == 3 * counts, status
        # Every judged trajectory is in the baseline
        assert bool(of_sequence(batch, "advantages", row).any()) != status.failed


def test_soft_overlong_punishment_lowers_the_reward() -> None:
    groups = [[trajectory(1, 6), trajectory(1, 10)]]
    algorithm = AlgorithmConfig(normalize=False, overlong=OverlongConfig(buffer=4, penalty=1.0))
    batch = batch_of(groups, algorithm, 10)
    # The first 6 = 10 - 4 tokens are free and 10 tokens cost the full penalty: rewards 1 and 0.
    np.testing.assert_allclose([of_sequence(batch, "advantages", r)[0] for r in (0, 1)], [0.5, -0.5], rtol=1e-6)


def test_prompts_and_a_constant_are_counted_within_a_mini_batch() -> None:
    groups = [[trajectory(g, 1 + g + s) for s in range(1 + g)] for g in range(3)]
    batch = batch_of(groups, AlgorithmConfig(), 10)
    first, second = mini_batches(batch, 2, AlgorithmConfig(loss_mean="prompts"))
    by_trajectory = [float(first.part(row, row + 1)["weights"].sum()) for row in range(3)]
    np.testing.assert_allclose(by_trajectory, [1 / 2, 2 / 5 / 2, 3 / 5 / 2], rtol=1e-6)
    assert second["weights"].sum() == pytest.approx(1)
    for part, sequences in zip(
        mini_batches(batch, 2, AlgorithmConfig(loss_mean="constant", loss_mean_length=8)), (3, 3), strict=True
    ):
        np.testing.assert_allclose(part["weights"].unique(), [0, 1 / (sequences * 8)], rtol=1e-6)


@pytest.mark.parametrize("mode", ["tokens", "sequences", "prompts", "micro_batches"])
def test_mini_batches_hold_whole_groups_and_weights_that_sum_to_one(mode: str) -> None:
    groups = [[trajectory(g, 1 + g + s) for s in range(2)] for g in range(5)]
    batch = batch_of(groups, AlgorithmConfig(), 10)
    parts = mini_batches(batch, 2, AlgorithmConfig(loss_mean=mode, loss_mean_samples=3))
    assert [len(p) for p in parts] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), batch.tokens.tokens)
    for part in parts:
        assert part["weights"].sum() == pytest.approx(1, abs=1e-6)
    weights = torch.cat([p["weights"] for p in parts])
    np.testing.assert_array_equal(weights != 0, batch.tokens["mask"] != 0)


def test_the_kl_term_may_have_a_mean_of_its_own() -> None:
    groups = [[trajectory(g, 1 + g + s) for s in range(2)] for g in range(3)]
    batch = batch_of(groups, AlgorithmConfig(), 10)
    for mean, coefficient, has_weights in (("sequences", 0.1, True), ("loss", 0.1, False), ("sequences", 0.0, False)):
        algorithm = AlgorithmConfig(kl=KlConfig(coefficient=coefficient, mean=mean))
        (mini,) = mini_batches(batch, 3, algorithm)
        assert ("kl_weights" in mini) is has_weights
    (mini,) = mini_batches(batch, 3, AlgorithmConfig(kl=KlConfig(coefficient=0.1, mean="sequences")))
    each = [mini["kl_weights"][mini.index([row])].sum() for row in range(6)]
    np.testing.assert_allclose(each, 1 / 6, rtol=1e-6)


def test_only_an_end_token_that_no_engine_drew_counts_as_not_drawn() -> None:
    nan = float("nan")
    groups = [[trajectory(1, 2, prompt=1), trajectory(0, 1, prompt=1)]]
    groups[0][0].logprobs, groups[0][1].logprobs = [0, nan, nan], [-1, nan]
    given = [Group(PROMPT, group) for group in groups]
    batch = make_batch(given, AlgorithmConfig(), RolloutConfig(conversation="one_message"))
    assert batch.tokens["drawn"].tolist() == [True, True, False, True, False]
    assert "drawn" not in make_batch(given, AlgorithmConfig(), RolloutConfig()).tokens


@pytest.mark.parametrize("conversation", ["messages", "one_message"])
def test_an_empty_micro_batch_has_the_columns_of_all_others(conversation: str) -> None:
    """More ranks than samples leave some ranks without one; metrics of all ranks are summed by name."""
    group = Group(PROMPT, [trajectory(1, 2), trajectory(0, 4)])
    batch = make_batch([group], AlgorithmConfig(), RolloutConfig(conversation=conversation))
    rows = torch.tensor([0, 1])
    full, empty = read_samples([batch.refs.take(rows), batch.refs.take(rows[:0])])
    assert not len(empty.tokens) and set(empty.columns) == set(full.columns)
    assert all(empty[name].dtype == full[name].dtype for name in full.columns)


@pytest.mark.parametrize("step_wise", ["off", "turns", "merged"])
def test_a_column_of_a_trajectory_is_cut_and_carried_with_its_tokens(step_wise: str) -> None:
    """Follows an integer column, aligned with input tokens, through batch and mini-batch; the failed trajectory lacks
    the column."""
    first, second, failed = trajectory(1, 5), trajectory(0, 4), trajectory(0, 0, Status.ERROR_ENV)
    for t in (first, second):
        half = len(t.tokens) - 2
        kinds = [(Kind.PROMPT, 0, 3), (Kind.RESPONSE, 3, half), (Kind.PROMPT, half, half + 1)]
        t.steps = [TrajectoryStep(*span) for span in (*kinds, (Kind.RESPONSE, half + 1, half + 2))]
        t.mask[half] = 0
        values = 10 * torch.tensor(t.tokens)[:, None, None] + torch.arange(6).reshape(3, 2)
        t.columns["routes"] = Column(values.to(torch.uint8), aligned="input")
    batch = make_batch([Group(PROMPT, [first, second, failed])], AlgorithmConfig(), RolloutConfig(step_wise=step_wise))
    assert batch.samples.tolist() == ([1, 1, 1] if step_wise == "off" else [2, 2, 1])
    routes = batch.tokens.columns["routes"]
    assert routes.aligned == "input" and routes.values.dtype == torch.uint8
    judged = len(batch.tokens.tokens) - len(failed.tokens)
    assert torch.equal(routes.values[:judged, 0, 0], (10 * batch.tokens.tokens[:judged]).to(torch.uint8))
    assert not routes.values[judged:].any()
    (mini,) = mini_batches(batch, None, AlgorithmConfig())
    assert torch.equal(mini["routes"], routes.values) and mini.columns["routes"].aligned == "input"


def test_a_column_that_is_no_longer_its_trajectorys_is_an_error() -> None:
    """Refuses columns of wrong length even if the total fits: two opposite errors would shift every value between
    them."""
    short, long = trajectory(1, 5), trajectory(0, 4)
    for t, more in ((short, -1), (long, 1)):
        t.columns["x"] = Column(torch.zeros(len(t.tokens) + more))
    with pytest.raises(ValueError, match="column x: 7 values for 8 tokens"):
        make_batch([Group(PROMPT, [short, long])], AlgorithmConfig(), RolloutConfig())


def test_no_groups_make_an_empty_batch() -> None:
    batch = make_batch([], AlgorithmConfig(), RolloutConfig())
    assert len(batch.tokens.lengths) == len(batch.tokens.tokens) == len(batch.tokens["mask"]) == 0
    assert token_advantages(batch, AlgorithmConfig()).shape == (0,)
    assert mini_batches(batch, 2, AlgorithmConfig()) == []


@pytest.mark.parametrize("kl, aux, loss, rewards, expected", [
    (0.0, 0.0, "ppo", (1.0, 0.0), True),
    (0.0, 0.0, "ppo", (1.0, 1.0), False),
    (0.0, 0.0, "gspo", (1.0, 1.0), False),
    (0.1, 0.0, "ppo", (1.0, 1.0), True),
    (0.0, 0.1, "ppo", (1.0, 1.0), True),
    (0.0, 0.0, "my.losses:mine", (1.0, 1.0), True),
    (0.1, 0.1, "my.losses:mine", (), False),
])  # fmt: skip
def test_what_a_mini_batch_teaches(
    kl: float, aux: float, loss: str, rewards: tuple[float, ...], expected: bool
) -> None:
    """Checks `has_gradient`; an empty `rewards` makes both environments fail."""
    algorithm = AlgorithmConfig(loss=loss, kl=KlConfig(coefficient=kl))
    both = [trajectory(reward, 2) for reward in rewards] or [trajectory(0.0, 2, Status.ERROR_ENV)] * 2
    batch = make_batch([Group(both[0].prompt, both)], algorithm, RolloutConfig())
    batch.tokens["advantages"] = token_advantages(batch, algorithm)
    assert teaches(batch, algorithm, MoeConfig(aux_loss=aux)) == [expected]
