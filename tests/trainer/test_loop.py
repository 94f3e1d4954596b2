"""Calls of the training loop to the policy, recorded by a stand-in."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.algorithms.entropy import EntropyCoefficient
from skyrl_mega.algorithms.mismatch import EDGES, PEAKS, TOTALS, WITHIN
from skyrl_mega.batch.samples import Samples
from skyrl_mega.config.schema import Config, CriticConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.checkpoints import Checkpoints
from skyrl_mega.trainer.loop import train_on, training_order
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory


class Notes:
    """A policy recording every call in `calls`, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.lengths: list[torch.Tensor] = []
        self.added: dict[str, torch.Tensor] = {}

    def hold(self, minis: list[Samples], silent: list[torch.Tensor] | None = None) -> None:
        self.calls.append(("hold", len(minis)))
        self.lengths = [mini.lengths for mini in minis]
        self.silent = silent

    def forward_only(self, mini: int) -> torch.Tensor:
        """Returns the samples without a gradient, as if every split were worth it."""
        return torch.zeros(0).long() if self.silent is None else self.silent[mini].nonzero()[:, 0]

    def left_out(self, mini: int) -> torch.Tensor:
        """Returns a token for every sample."""
        return torch.ones_like(self.lengths[mini])

    @property
    def tokens(self) -> list[int]:
        return [int(lengths.sum()) for lengths in self.lengths]

    def keep_logprobs(self, name: str, *, temperature: float, **columns: str | None) -> None:
        self.calls.append((name, *(column for column in columns.values() if column)))

    def add(self, name: str, values: list[torch.Tensor], *, per_sample: bool = False) -> None:
        if per_sample:
            values = [v.repeat_interleave(lengths) for v, lengths in zip(values, self.lengths, strict=True)]
        self.calls.append((name, [len(v) for v in values]))
        self.added[name] = torch.cat(values)

    def column(self, name: str) -> list[torch.Tensor]:
        self.calls.append(("column", name))
        return [torch.full((n,), 0.1 if name == "old_squares" else -2.0) for n in self.tokens]

    def train(self, mini: int, **_: object) -> dict[str, float]:
        self.calls.append(("train", mini))
        return {**self.sums(mini), "grad_norm": 7.0}

    def measure(self, mini: int, **_: object) -> dict[str, float]:
        self.calls.append(("measure", mini))
        return self.sums(mini)

    def sums(self, mini: int) -> dict[str, float]:
        sums = dict.fromkeys((*TOTALS.values(), *PEAKS.values()), 0.5)
        within = {f"{WITHIN}.{i}": float(edge >= 0.5) for i, edge in enumerate(EDGES)}
        return {"loss": 2.0 + mini, "mismatch_tokens": 1.0, **sums, **within}


def group(*rewards: float, status: Status = Status.COMPLETED) -> Group:
    prompt = Prompt(0, [], "mine", {})
    parts = array("i", [1, 2, 3]), array("b", [0, 1, 1]), array("f", [0.0, -1.0, -1.0])
    return Group(prompt, [Trajectory(prompt, i, *parts, 1, reward, status, 1) for i, reward in enumerate(rewards)])


class CriticNotes(Notes):
    """A critic with the value 0.25 for every counted token; records the returns to learn."""

    def values(self, name: str) -> list[torch.Tensor]:
        self.calls.append(("values", name))
        return [torch.full((n,), 0.25) for n in self.tokens]

    def add(self, name: str, values: list[torch.Tensor], *, per_sample: bool = False) -> None:
        assert not per_sample
        self.calls.append((name, torch.cat(values).tolist()))


def after_with_critic(groups: list[Group], step: int = 1, **critic: Any) -> tuple[Notes, CriticNotes, dict[str, float]]:
    """Runs a step on these groups with a critic; returns the calls to policy and critic, and the metrics."""
    config, policy, values = Config(critic=CriticConfig(**critic)), Notes(), CriticNotes()
    config.algorithm.advantage, config.algorithm.gae.lam = "gae", 1.0
    config.algorithm.whiten = "batch"
    train_step = Step(step, Console())
    run: Any = SimpleNamespace(config=config, policy=policy, reference=None, critic=values, temperature=1.0)
    run.entropy = EntropyCoefficient(config.algorithm.entropy)
    train_on(run, train_step, groups)
    return policy, values, train_step.metrics


def test_a_critic_learns_returns_and_the_policy_what_it_did_not_expect() -> None:
    """Trains with λ = 1: the return of every policy token is the reward; other tokens get no return."""
    policy, critic, metrics = after_with_critic([group(1.0, 0.0)], epochs=2)
    assert [call[0] for call in critic.calls] == ["hold", "values", "returns", "train", "train"]
    returns = dict(call for call in critic.calls if call[0] == "returns")["returns"]
    assert sorted({round(r, 6) for r in returns}) == [0.0, 0.25, 1.0], "a prompt's token has its value as its return"
    assert policy.calls == [("hold", 1), ("advantages", [6]), ("train", 0)]
    assert policy.added["advantages"].tolist() == pytest.approx([0, *[3**0.5 / 2] * 2, 0, *[-(3**0.5) / 2] * 2])
    assert metrics["critic/return"] == pytest.approx(0.5)
    assert metrics["critic/explained_variance"] == pytest.approx(0.0)
    assert metrics["critic/grad_norm"] == 7.0 and "time/critic" in metrics and "time/values" in metrics


def test_only_the_critic_learns_in_its_warm_up() -> None:
    policy, critic, metrics = after_with_critic([group(1.0, 0.0)], step=3, warmup_steps=3)
    assert policy.calls[-1] == ("measure", 0) and critic.calls[-1] == ("train", 0)
    assert metrics["policy/steps_skipped"] == 1
    policy, _, _ = after_with_critic([group(1.0, 0.0)], step=4, warmup_steps=3)
    assert policy.calls[-1] == ("train", 0)


def test_a_step_without_a_token_teaches_a_critic_nothing() -> None:
    _, critic, metrics = after_with_critic([group(0.0, 1.0, status=Status.ERROR_ENV)])
    assert critic.calls[-1][0] == "returns" and "critic/loss" not in metrics


def after(
    groups: list[Group],
    mini_batch_prompts: int | None,
    advantage: str = "grpo",
    change: Callable[[Config], None] = lambda config: None,
) -> tuple[list[Any], dict[str, float]]:
    """Runs a step on these groups; returns the calls to the policy, and the metrics."""
    config, policy, step = Config(), Notes(), Step(1, Console())
    config.data.mini_batch_prompts = mini_batch_prompts
    config.algorithm.advantage = advantage
    change(config)
    entropy = EntropyCoefficient(config.algorithm.entropy)
    run: Any = SimpleNamespace(config=config, policy=policy, reference=None, critic=None, temperature=1.0)
    run.entropy = entropy
    train_on(run, step, groups)
    return policy.calls, step.metrics


def test_a_mini_batch_without_a_signal_is_no_optimizer_step() -> None:
    calls, metrics = after([group(1.0, 1.0), group(1.0, 0.0), group(0.0, 0.0)], 1)
    assert calls == [
        ("hold", 3),
        ("old_logprobs",),
        ("advantages", [6, 6, 6]),
        ("measure", 0),
        ("train", 1),
        ("measure", 2),
    ]
    assert (metrics["policy/steps_skipped"], metrics["policy/loss"], metrics["policy/grad_norm"]) == (2.0, 3.0, 7.0)
    assert metrics["mismatch/logprob_abs_mean"] == 0.5


def test_one_that_teaches_in_part_is_a_step() -> None:
    calls, metrics = after([group(1.0, 1.0), group(1.0, 0.0)], None)
    assert calls == [("hold", 1), ("advantages", [12]), ("train", 0)]
    assert metrics["policy/steps_skipped"] == 0


@pytest.mark.parametrize(
    ("change", "silent", "share"),
    [
        ({}, [[True, True, False, False], [True, True, True]], 15 / 21),
        ({"kl.coefficient": 0.1}, [[False, False, False, False], [True, False, False]], 3 / 21),
        ({"entropy.target": 0.2}, [[False, False, False, False], [True, False, False]], 3 / 21),
        ({"loss": "dro"}, [[False, False, False, False], [True, False, False]], 3 / 21),
        ({"advantage": "grpo_turns"}, None, 9 / 21),
    ],
    ids=str,
)
def test_samples_without_a_gradient_are_named_before_ranks_get_them(
    change: dict[str, Any], silent: list[list[bool]] | None, share: float
) -> None:
    """Trains on groups without a signal, with one, and with a failure and equal rewards; KL and an entropy bonus pull
    on every counted token."""
    config, policy, step = Config(), Notes(), Step(1, Console())
    config.data.mini_batch_prompts = 2
    for name, value in change.items():
        section, _, field = name.rpartition(".")
        setattr(getattr(config.algorithm, section) if section else config.algorithm, field, value)
    failed = group(1.0, 1.0, 1.0)
    failed.trajectories[0].status = Status.ERROR_ENV
    run: Any = SimpleNamespace(config=config, policy=policy, reference=None, critic=None, temperature=1.0)
    run.entropy = EntropyCoefficient(config.algorithm.entropy)
    train_on(run, step, [group(1.0, 1.0), group(1.0, 0.0), failed])
    assert (None if policy.silent is None else [part.tolist() for part in policy.silent]) == silent
    assert step.metrics["policy/forward_only_fraction"] == pytest.approx(share)


def test_shared_tokens_count_once_in_work_and_are_a_metric() -> None:
    config, step = Config(), Step(1, Console())
    config.policy.share_prefixes = True
    run: Any = SimpleNamespace(config=config, policy=Notes(), reference=None, critic=None, temperature=1.0)
    run.entropy = EntropyCoefficient(config.algorithm.entropy)
    train_on(run, step, [group(1.0, 0.0)])
    assert step.metrics["policy/shared_fraction"] == pytest.approx(2 / run.policy.tokens[0])
    assert step.loads["train"].tokens == 3 * (run.policy.tokens[0] - 2)


def test_a_step_without_any_signal_only_measures() -> None:
    failed = group(0.0, 1.0, status=Status.ERROR_ENV)
    calls, metrics = after([group(1.0, 1.0), failed], 1)
    assert calls == [("hold", 2), ("old_logprobs",), ("advantages", [6, 6]), ("measure", 0), ("measure", 1)]
    assert metrics["policy/steps_skipped"] == 2 and metrics["mismatch/logprob_abs_mean"] == 0.5
    assert "policy/grad_norm" not in metrics


def test_a_gradient_of_zero_is_counted_as_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "train", lambda self, mini, **_: {**self.sums(mini), "grad_norm": 0.0})
    _, metrics = after([group(1.0, 0.0)], None)
    assert (metrics["policy/steps_skipped"], metrics["policy/grad_norm"]) == (1.0, 0.0)


def test_a_mini_batch_without_a_token_has_no_mean() -> None:
    failed = group(0.0, 1.0, status=Status.ERROR_ENV)
    _, metrics = after([failed, group(1.0, 0.0)], 1)
    assert metrics["policy/loss"] == 3.0


OWN = """
from skyrl_mega.algorithms.advantages import per_token

@per_token("old_logprobs")
def surprise(inputs, algorithm):
    return inputs.token.rewards_T - inputs.token.old_T
"""


def test_what_an_estimator_needs_is_there_before_advantages(tmp_path: Path) -> None:
    """Requests old log-probs for an estimator even in a step of a single mini-batch; other estimators need none
    there."""
    (tmp_path / "own.py").write_text(OWN)
    calls, _ = after([group(1.0, 1.0)], None, f"{tmp_path / 'own.py'}:surprise")
    assert calls[:4] == [("hold", 1), ("old_logprobs",), ("column", "old_logprobs"), ("advantages", [6])]
    assert calls[4:] == [("train", 0)]


def test_several_epochs_take_every_mini_batch_again_in_an_order_of_the_seed() -> None:
    def twice(config: Config) -> None:
        config.data.epochs_per_step = 3

    groups = [group(1.0, 0.0), group(1.0, 1.0), group(0.0, 1.0)]
    calls, metrics = after(groups, 1, change=twice)
    steps = calls[3:]
    assert calls[:3] == [("hold", 3), ("old_logprobs",), ("advantages", [6, 6, 6])]
    assert [mini for _, mini in steps[:3]] == [0, 1, 2] and len(steps) == 9
    assert all(sorted(mini for _, mini in steps[i : i + 3]) == [0, 1, 2] for i in (0, 3, 6))
    assert {what for what, mini in steps if mini == 1} == {"measure"} and metrics["policy/steps_skipped"] == 3.0
    orders = {tuple(training_order(5, 2, [0, step])) for step in range(9)}
    assert len(orders) > 5 and {order[:5] for order in orders} == {(0, 1, 2, 3, 4)}
    assert training_order(5, 2, [0, 4]) == training_order(5, 2, [0, 4]) != training_order(5, 2, [1, 4])


def test_each_mini_batch_has_the_mean_of_its_own_importance_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the mean importance weight of each mini-batch: π_old is e^-2 for every token, the engine's probability
    e^-1 in the first group and e^-2.5 in the second."""

    def normalized(config: Config) -> None:
        config.algorithm.importance_cap, config.algorithm.importance_normalize = 10.0, True
        config.data.epochs_per_step = 3

    def train(self: Notes, mini: int, **given: Any) -> dict[str, float]:
        divided.append((mini, given["figures"].importance_mean))
        return {**self.sums(mini), "grad_norm": 7.0}

    divided: list[tuple[int, float]] = []
    monkeypatch.setattr(Notes, "train", train)
    groups = [group(1.0, 0.0), group(0.0, 1.0)]
    for t in groups[1].trajectories:
        t.logprobs = array("f", [0.0, -2.5, -2.5])
    after(groups, 1, change=normalized)
    expected = [math.exp(-1.0), math.exp(0.5)]
    assert len(divided) == 6 and {mini for mini, _ in divided} == {0, 1}
    assert [mean for _, mean in divided] == pytest.approx([expected[mini] for mini, _ in divided])


def test_one_mini_batch_in_two_epochs_needs_the_log_probs_before_the_first() -> None:
    def twice(config: Config) -> None:
        config.data.epochs_per_step = 2

    calls, _ = after([group(1.0, 0.0)], None, change=twice)
    assert ("old_logprobs",) in calls
    assert ("old_logprobs",) not in after([group(1.0, 0.0)], None)[0]


def test_ratios_to_the_engine_need_no_log_probs_of_the_policy() -> None:
    def engine(config: Config) -> None:
        config.algorithm.old_logprobs = "engine"

    calls, _ = after([group(1.0, 0.0), group(0.0, 1.0)], 1, change=engine)
    assert [what for what, *_ in calls] == ["hold", "advantages", "train", "train"]


@pytest.mark.parametrize(("replay", "routes"), [("rollout", 1.5), ("policy", 2.0)])
def test_the_engine_is_compared_with_weights_that_have_not_moved(
    monkeypatch: pytest.MonkeyPatch, replay: str, routes: float
) -> None:
    """Measures the mismatch up to the second mini-batch, the first with a gradient: the third sees other weights, and
    no old log-probs are kept."""

    def engine(config: Config) -> None:
        config.algorithm.old_logprobs, config.policy.moe.replay = "engine", replay

    def sums(self: Notes, mini: int) -> dict[str, float]:
        counts = dict.fromkeys((f"replay_{what}_0" for what in ("tokens", "replayed", "wrong")), 10.0)
        return {**whole(self, mini), "mismatch_abs": mini + 1.0, **counts, "replay_differs_0": 10.0 * (mini + 1)}

    whole = Notes.sums
    monkeypatch.setattr(Notes, "sums", sums)
    monkeypatch.setattr("skyrl_mega.trainer.loop.check_routes", lambda batch: None)
    calls, metrics = after([group(1.0, 1.0), group(1.0, 0.0), group(0.0, 1.0)], 1, change=engine)
    assert [what for what, *_ in calls] == ["hold", "advantages", "measure", "train", "train"]
    assert metrics["mismatch/logprob_abs_mean"] == 1.5
    assert metrics["replay/route_mismatch"] == routes


def test_what_a_loss_chooses_over_a_mini_batch_is_chosen_before_the_first_optimizer_step() -> None:
    def both(config: Config) -> None:
        config.algorithm.loss, config.algorithm.entropy.top_share = "clip_cov", 0.5

    calls, _ = after([group(1.0, 0.0)], None, change=both)
    assert calls == [
        ("hold", 1),
        ("old_logprobs", "old_entropy"),
        ("column", "old_entropy"),
        ("column", "old_logprobs"),
        ("advantages", [6]),
        ("high_covariance", [6]),
        ("high_entropy", [6]),
        ("train", 0),
    ]


def test_a_baseline_of_tokens_needs_the_distributions_that_they_were_drawn_from() -> None:
    calls, metrics = after([group(1.0, 0.0)], None, "optimal_token_baseline")
    assert calls == [
        ("hold", 1),
        ("old_logprobs", "old_squares"),
        ("column", "old_logprobs"),
        ("column", "old_squares"),
        ("advantages", [6]),
        ("train", 0),
    ]
    assert metrics["policy/steps_skipped"] == 0


def test_an_entropy_bonus_teaches_where_no_advantage_does() -> None:
    def bonus(config: Config) -> None:
        config.algorithm.entropy.coefficient = 0.01

    calls, metrics = after([group(1.0, 1.0)], None, change=bonus)
    assert calls[-1] == ("train", 0) and metrics["policy/entropy_coefficient"] == 0.01
    assert "policy/entropy_coefficient" not in after([group(1.0, 1.0)], None)[1]


def test_the_adaptive_coefficient_comes_back_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened() -> Run:
        config = Config()
        config.algorithm.entropy.target = 0.5
        stream: Any = SimpleNamespace(state=lambda: {"at": 3}, restore=lambda state: None)
        policy: Any = SimpleNamespace(save=lambda folder: None, restore=lambda folder: None)
        nothing: Any = None
        rollouts: Any = SimpleNamespace(restore=lambda folder: "taken up again: 3 groups")
        checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
        return Run(
            config, tmp_path, Console(), nothing, policy, None, None, nothing, rollouts, nothing, stream, checkpoints,
            nothing,
        )  # fmt: skip

    run = opened()
    run.entropy.update(0.4)
    run.save()
    again = opened()
    assert again.entropy.applied == 0.0 and again.restore()
    assert again.entropy.applied == run.entropy.applied == 0.005 and again.entropy.entropy == 0.4
    assert "taken up again: 3 groups" in capsys.readouterr().out, "and what its rollouts have taken is said"
