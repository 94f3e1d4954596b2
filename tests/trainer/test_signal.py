"""The learning signal: groups with a signal, and runs learning from other sources than differing rewards."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.algorithms.entropy import EntropyCoefficient
from skyrl_mega.batch import make_batch as without_tokens
from skyrl_mega.batch.advantages import compute_advantages
from skyrl_mega.batch.rewards import UNNAMED
from skyrl_mega.config.derived import response_limit
from skyrl_mega.config.schema import AlgorithmConfig, Config, OverlongConfig, RolloutConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.dynamic_sampling import with_signal
from skyrl_mega.trainer.health.watch import CannotLearn, Health
from skyrl_mega.trainer.loop import train_on
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Kind, Status, Trajectory
from skyrl_mega.trajectories.trajectory import TrajectoryStep as Part
from tests.support.batches import make_batch, token_advantages
from tests.trainer.test_loop import CriticNotes, Notes

GROUPS = 40


def said(prompt: Prompt, sample: int, *turns: float, words: int = 2, **rewards: float) -> Trajectory:
    """Returns a trajectory of one prompt token, and an answer of `words` tokens for each reward."""
    tokens = 1 + words * len(turns)
    parts = [Part(Kind.PROMPT, 0, 1, messages=1)]
    for i, reward in enumerate(turns):
        start = 1 + words * i
        parts.append(Part(Kind.RESPONSE, start, start + words, messages=1, reward=reward, finish="stop"))
    trajectory = Trajectory(
        prompt,
        sample,
        array("i", range(tokens)),
        array("b", [0] + [1] * (tokens - 1)),
        array("f", [0.0] + [-1.0] * (tokens - 1)),
        1,
        sum(turns),
        Status.COMPLETED,
        len(turns),
    )
    trajectory.steps, trajectory.rewards = parts, rewards
    trajectory.messages = [
        {"role": "user", "content": "?"},
        *({"role": "assistant", "content": f"{sample}"} for _ in turns),
    ]
    return trajectory


def groups_of(answer: Callable[[Prompt, int], Trajectory], samples: int = 2) -> list[Group]:
    prompts = [Prompt(uid, [], "mine", {}) for uid in range(GROUPS)]
    return [Group(p, [answer(p, i) for i in range(samples)]) for p in prompts]


def plain(config: Config) -> None:
    """Leaves the configuration unchanged."""


def overlong(config: Config) -> None:
    config.algorithm.overlong.buffer = response_limit(config.rollout) - 2


EQUAL = groups_of(lambda p, i: said(p, i, 1.0, words=2 + 3 * i))
TURNS = groups_of(lambda p, i: said(p, i, float(i == 0), float(i == 1)))
NOTHING = groups_of(lambda p, i: said(p, i, 0.0, words=2 + 3 * i))
CASES: dict[str, tuple[str, Callable[[Config], None], list[Group], float]] = {
    # case: advantage, settings, groups with equal reward sums, share of tokens with an advantage
    "answers with rewards of their own": ("grpo_turns", plain, TURNS, 0.5),
    "a punishment of length": ("grpo", overlong, EQUAL, 1.0),
    "a critic": ("gae", plain, EQUAL, 1.0),
    "no baseline": ("reinforce", plain, EQUAL, 1.0),
    "equal rewards alone": ("grpo", plain, EQUAL, 0.0),
    "equal rewards, summed": ("grpo", plain, TURNS, 0.0),
    "no reward": ("reinforce", plain, NOTHING, 0.0),
}


def run_of(advantage: str, change: Callable[[Config], None]) -> Any:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt, config.algorithm.advantage = GROUPS, 2, advantage
    config.run.patience = 25
    change(config)
    values = CriticNotes() if advantage == "gae" else None
    run: Any = SimpleNamespace(config=config, policy=Notes(), reference=None, critic=values, temperature=1.0)
    run.entropy = EntropyCoefficient(config.algorithm.entropy)
    return run


@pytest.mark.parametrize("case", CASES)
def test_only_a_run_without_advantages_is_stuck(case: str) -> None:
    advantage, change, groups, share = CASES[case]
    run = run_of(advantage, change)
    health, lines, step = Health(run.config), list[str](), Step(1, Console())
    train_on(run, step, groups)
    assert step.metrics["policy/advantage_fraction"] == share
    metrics = {name: value for name, value in step.metrics.items() if not name.startswith("mismatch/")}
    for number in range(1, 28):
        verdict = health.check(number, metrics, [t for group in groups for t in group.trajectories])
        assert verdict.stuck == (0 if share else number)
        lines += verdict.lines
        if number < 25 or share:
            health.end_if_stuck(number)
    assert any("equal_rewards" in line for line in lines) == (advantage != "grpo_turns")
    assert all(("from elsewhere" in line) == bool(share) for line in lines)
    if not share:
        with pytest.raises(CannotLearn, match=r"equal_rewards: .*no advantage"):
            health.end_if_stuck(27)


@pytest.mark.parametrize(
    ("advantage", "rewards", "signal"),
    [
        ("grpo_turns", [[1, 0], [0, 1]], True),
        ("grpo_turns", [[0, 1], [0, 1]], False),  # as in most environments: the only reward is at the end
        ("grpo_turns", [[1], [1, 0]], True),
        ("grpo_turns", [[0], [0, 0]], False),
        ("grpo_turns", [[1], [1, 1]], False),
        ("grpo_turns", [[0.7, 0.1], [0.8, 0]], True),
        ("grpo_turns", [[0.1 + 0.2], [0.3]], False),
        ("grpo_turns", [[1, 0]], False),
        ("grpo_turns", [[0.1, 0.2, -0.3]] * 3 + [[0.1, 0.2, -0.3, 0]], False),  # the mean is 1e-17
        ("grpo", [[0.1, 0.2, -0.3], [-0.3, 0.2, 0.1], [0]], False),
        ("optimal_token_baseline", [[0.1, 0.2, -0.3], [-0.3, 0.2, 0.1]], True),
        ("grpo", [[1, 0], [0, 1]], False),
        ("grpo", [[0.1, 0.2], [0.3]], False),
        ("grpo", [[0.1, 0.2], [0.4]], True),
        ("rloo", [[0.1, 0.2], [0.3]], False),
        ("opo", [[0.1, 0.2], [0.3]], False),
        ("reinforce++", [[0.7, 0.2, 0.1], [1]], False),
        ("optimal_token_baseline", [[0.7, 0.2, 0.1], [1]], False),
        ("optimal_token_baseline", [[0.7, 0.2, 0.1], [0.9]], True),
    ],
)
def test_a_group_has_a_signal_where_its_advantages_differ(
    advantage: str, rewards: list[list[float]], signal: bool
) -> None:
    run, prompt = run_of(advantage, plain), Prompt(0, [], "mine", {})
    group = Group(prompt, [said(prompt, i, *map(float, turns)) for i, turns in enumerate(rewards)])
    algorithm = run.config.algorithm
    batch = make_batch([group], algorithm, run.config.rollout)
    for name in ("old_logprobs", "old_squares"):
        batch.tokens[name] = torch.full((len(batch.tokens.tokens),), -0.5 if name == "old_logprobs" else 0.4)
    advantages = token_advantages(batch, algorithm).split(batch.trajectory_tokens.tolist())
    alike = all(bool((a[: len(b)] == b[: len(a)]).all()) for a, b in combinations(advantages, 2))
    assert alike == (not signal)
    assert with_signal([group], algorithm) == [group] * signal
    health = Health(run.config).check(1, {}, group.trajectories)
    # A group of one trajectory cannot be compared.
    assert health.metrics.get("rollout/groups_differ") == (float(signal) if len(rewards) > 1 else None)


@pytest.mark.parametrize(
    ("named", "weights", "signal"),
    [
        (["100", "010", "001", "001"], {}, True),  # all sums are 1
        (["100", "010", "001", "001"], {"a": 0.0, "b": 0.0, "c": 0.0}, False),
        (["110", "110", "110", "110"], {}, False),
        (["100", "000", "000", "000"], {"a": 0.0}, False),
    ],
)
def test_one_reward_that_differs_is_a_signal_to_gdpo(named: list[str], weights: dict[str, float], signal: bool) -> None:
    run, prompt = run_of("gdpo", plain), Prompt(0, [], "mine", {})
    run.config.algorithm.reward_weights = weights
    rewards = [dict(zip("abc", map(float, digits), strict=True)) for digits in named]
    group = Group(prompt, [said(prompt, i, 1.0, **each) for i, each in enumerate(rewards)])
    algorithm = run.config.algorithm
    advantages = token_advantages(make_batch([group], algorithm, run.config.rollout), algorithm)
    assert bool(advantages.any()) == signal
    assert with_signal([group], algorithm) == [group] * signal
    algorithm.dynamic_sampling.reward = "b"
    assert with_signal([group], algorithm) == [group] * any(digits[1] != named[0][1] for digits in named)


def test_what_was_earned_without_a_name_is_a_reward_of_its_own_to_gdpo() -> None:
    """Judges the first answer of a trajectory with a number, and the second with two named rewards."""
    run, prompt = run_of("gdpo", plain), Prompt(0, [], "mine", {})
    run.config.algorithm.reward_weights = {"a": 2.0, "b": 1.0}
    group = Group(prompt, [said(prompt, 0, 0.5, 2.1, a=1.0, b=0.1), said(prompt, 1, 0.0, 2.1, a=1.0, b=0.1)])
    algorithm = run.config.algorithm
    batch = make_batch([group], algorithm, run.config.rollout)
    assert {name: values.tolist() for name, values in batch.named.items()} == {
        "a": [1.0, 1.0],
        "b": pytest.approx([0.1, 0.1]),
        UNNAMED: [0.5, 0.0],
    }
    assert token_advantages(batch, algorithm).any() and with_signal([group], algorithm) == [group]


def test_an_environments_own_reward_named_reward_is_not_what_has_no_name() -> None:
    """Weights an environment's own reward called `reward` with -1: the second trajectory, with an unnamed 1 besides, is
    better."""
    run, prompt = run_of("gdpo", plain), Prompt(0, [], "mine", {})
    algorithm = run.config.algorithm
    algorithm.reward_weights = {"reward": -1.0}
    group = Group(prompt, [said(prompt, 0, 0.0, -1.0, reward=1.0), said(prompt, 1, 1.0, -1.0, reward=1.0)])
    batch = make_batch([group], algorithm, run.config.rollout)
    worse, better = (values.unique() for values in token_advantages(batch, algorithm).split([5, 5]))
    assert worse.min() < 0 and better.max() > 0 and with_signal([group], algorithm) == [group]


def test_sums_that_differ_by_rounding_are_equal_rewards() -> None:
    run = run_of("grpo", plain)
    health = Health(run.config)
    groups = groups_of(lambda p, i: said(p, i, *([0.1, 0.2] if i else [0.3])))
    assert len({t.reward for t in groups[0].trajectories}) == 2
    verdict = health.check(1, {}, [t for group in groups for t in group.trajectories])
    assert "all 80 are 0.3" in verdict.lines[0] and verdict.stuck == 1


@pytest.mark.parametrize(("a", "b", "same"), [(0.4, 0.3, True), (0.3, 0.19, False), (7.3, 7.2, True), (-1.0, 0, False)])
def test_a_tolerance_holds_what_differs_by_it(a: float, b: float, same: bool) -> None:
    run, prompt = run_of("grpo", plain), Prompt(0, [], "mine", {})
    run.config.algorithm.dynamic_sampling.tolerance = 0.1
    group = Group(prompt, [said(prompt, 0, a), said(prompt, 1, b)])
    assert with_signal([group], run.config.algorithm) == [group] * (not same)


def test_a_loss_of_ones_own_learns_without_advantages() -> None:
    run = run_of("grpo", plain)
    run.config.algorithm.loss = "mine.distil"
    health = Health(run.config)
    for number in range(1, 28):
        metrics = {"policy/grad_norm": 0.3, "policy/advantage_fraction": 0.0}
        assert health.check(number, metrics, [t for group in EQUAL for t in group.trajectories]).stuck == 0


def test_tokens_that_are_not_in_the_loss_have_no_part_in_the_share() -> None:
    """Counts the tokens of the first trajectory alone: others have advantage 0, or are left out as truncated."""
    prompt, algorithm = Prompt(0, [], "mine", {}), AlgorithmConfig(overlong=OverlongConfig(filter=True))
    statuses = (Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED_TOKENS, Status.COMPLETED)
    played = [said(prompt, i, reward) for i, reward in enumerate((1.0, 0.5, 0.0, 0.5))]
    for t, status in zip(played, statuses, strict=True):
        t.status = status
    for read in (make_batch, without_tokens.make_batch):
        batch = read([Group(prompt, played)], algorithm, RolloutConfig())
        learning = compute_advantages(batch, algorithm).learning
        assert learning.tolist() == [played[0].written, 0, 0, 0] and batch.counts[2] == 0
