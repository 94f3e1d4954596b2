"""A run unable to learn warns, and ends after `run.patience` steps and `run.patience_groups` groups; neither bad luck
nor success ends a run."""

from __future__ import annotations

import math
import random

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.trainer.health.watch import REPEAT_AFTER, CannotLearn, Health
from skyrl_mega.trajectories.trajectory import Trajectory
from tests.trainer.health_steps import (
    Metrics,
    Play,
    equal_rewards,
    every,
    healthy,
    said,
    settings,
    spoiled,
    steps,
    unread,
)

PLAIN = settings()


def test_it_is_said_again_after_a_while_and_ends_when_patience_is_out() -> None:
    config = settings(patience=12, groups=300)
    health, lines = Health(config), list[str]()
    play = every(PLAIN, unread)
    for number, (_, said_now, stuck) in enumerate(steps(health, play, seed=0, count=12), start=1):
        assert stuck == number
        lines += said_now
        if number < 12:
            health.end_if_stuck(number)
    assert [line.split(":")[1] for line in lines] == [" step 1", f" step {1 + REPEAT_AFTER}"]
    assert lines[0].endswith("the run ends after 11 more such steps") and lines[1].endswith("after 1 more such step")
    with pytest.raises(CannotLearn, match=r"the last 12 steps up to 12 .*run\.patience = 12.*nothing_parsed: .*null"):
        health.end_if_stuck(12)


@pytest.mark.parametrize("patience", [None, 0])
def test_without_patience_nothing_ends(patience: int | None) -> None:
    health = Health(settings(patience=patience))
    for _, lines, _ in steps(health, equal_rewards(PLAIN), seed=0, count=60):
        assert not any("the run ends" in line for line in lines)
    health.end_if_stuck(60)


def test_one_step_to_learn_from_starts_the_count_again() -> None:
    health = Health(PLAIN)
    list(steps(health, equal_rewards(PLAIN), seed=0, count=20))
    assert health.stuck == 20
    list(steps(health, healthy(PLAIN), seed=0, count=1, first=21))
    assert health.stuck == 0


def test_a_resumed_run_counts_on_and_one_that_had_ended_begins_again() -> None:
    rows = [
        {"step": float(i), "health/stuck_steps": float(i), "health/stuck_groups": 8.0 * i, "reward/mean": 0.0}
        for i in range(1, 8)
    ]
    for patience, groups, counted in ((25, 0, 7), (7, 56, 0), (7, 57, 7), (None, 0, 7)):
        health = Health(settings(patience=patience, groups=groups))
        health.remember([{"step": 0.0, "eval/a/mean": 0.0}, *rows])
        assert (health.stuck, health.groups, len(health.past)) == (counted, 8 * counted, 7)


def ended(config: Config, play: Play, seed: int, most: int) -> int | None:
    """Returns the step at which a run ends for lack of patience, or None."""
    health = Health(config)
    for number, _ in enumerate(steps(health, play, seed, most), start=1):
        try:
            health.end_if_stuck(number)
        except CannotLearn:
            return number
    return None


def test_so_many_groups_are_no_bad_luck() -> None:
    groups = Config().run.patience_groups
    assert 0.99**groups <= 1e-4 < 0.99 ** (groups - 1)


def sparse(config: Config, each: int) -> Play:
    """Returns a play of healthy steps in which one of `each` groups contains a rewarded answer."""
    whole = healthy(config)

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        metrics, played = whole(rng, step)
        samples = config.data.samples_per_prompt
        right = {i for i in range(0, len(played), samples) if rng.randrange(each) == 0}
        return metrics, [said(t.prompt.uid, f"a{i}", float(i in right)) for i, t in enumerate(played)]

    return play


def test_bad_luck_in_small_steps_ends_no_run() -> None:
    play = sparse(settings(8, 2), each=100)
    by_steps = [ended(settings(8, 2, groups=0), play, seed, most=150) for seed in range(12)]
    assert len([end for end in by_steps if end]) >= 3, "25 steps of 8 groups are often without a reward"
    assert [ended(settings(8, 2), play, seed, most=150) for seed in range(12)] == [None] * 12


@pytest.mark.parametrize(
    ("config", "name", "end"),
    [
        (settings(8, 2), "rewards that never differ", 117),  # reported from the third step on; 917 groups of 8
        (settings(32, 4), "rewards that never differ", 29),
        (settings(64, 2), "rewards that never differ", 25),
        (settings(64, 1, advantage="reinforce"), "rewards that never differ", 25),
        (settings(8, 2), "a loss that is no number", 25),  # bad luck cannot explain this
        (settings(8, 2), "answers that nobody can read", 25),
        (settings(8, 2), "everything clipped", 26),  # the first step alone is no evidence
        (settings(8, 2, patience=3, groups=0), "rewards that never differ", 5),
    ],
)
def test_when_a_run_ends_that_cannot_learn(config: Config, name: str, end: int) -> None:
    plays = {
        "rewards that never differ": equal_rewards(config),
        "answers that nobody can read": every(
            config, lambda i, t: said(t.prompt.uid, f"a{i}", 0.0, metadata={"parsed_answer": None})
        ),
        "a loss that is no number": spoiled(config, **{"policy/loss": math.nan}),
        "everything clipped": spoiled(config, **{"policy/clip_fraction": 0.97}),
    }
    warnings = {
        line for _, lines, _ in steps(Health(config), plays[name], 0, end - 1) for line in lines if "ends" in line
    }
    assert any(f"the run ends after {end - int(line.split()[2][:-1])} more such step" in line for line in warnings)
    assert ended(config, plays[name], seed=0, most=end + 1) == end


def test_a_task_that_is_solved_is_not_stuck() -> None:
    health = Health(PLAIN)
    list(steps(health, healthy(PLAIN), seed=0, count=15))
    solved = every(
        PLAIN, lambda i, t: said(t.prompt.uid, f"a{i}", 1.0), **{"reward/mean": 1.0, "policy/grad_norm": 0.0}
    )
    for kinds, _, stuck in steps(health, solved, seed=0, count=80, first=16):
        assert kinds == {"nothing_left"} and not stuck
