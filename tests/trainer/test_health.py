"""Runs that cannot learn are named within three steps, with the evidence, and end; healthy ones raise nothing.

`quickstart_figures.csv` has the figures of a real quickstart (seed 3): what is healthy is made from them.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.trajectory import Kind, Status, Step, Trajectory
from skyrl_mega.trainer.health.seen import shown
from skyrl_mega.trainer.health.watch import AGAIN, CannotLearn, Health

HERE = Path(__file__).parent
COUNTS = {"stuck_steps", "stuck_groups"}
Metrics = dict[str, float]
Play = Callable[[random.Random, int], tuple[Metrics, list[Trajectory]]]
"""A step's metrics and trajectories."""


def real() -> list[Metrics]:
    with (HERE / "quickstart_figures.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


REAL = real()


def settings(prompts: int = 32, samples: int = 4, **given: Any) -> Config:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = prompts, samples
    config.rollout.sampling.stop = given.get("stop", [])
    config.algorithm.advantage = given.get("advantage", "grpo")
    config.algorithm.overlong.filter = given.get("filter", False)
    config.algorithm.dynamic_sampling.enabled = given.get("dynamic", False)
    config.run.patience = given.get("patience", 25)
    config.run.patience_groups = given.get("groups", config.run.patience_groups)
    return config


def said(uid: int, text: str, reward: float, **other: Any) -> Trajectory:
    """One question and one answer."""
    tokens = [1, 2, *text.encode()]
    values: dict[str, Any] = dict(
        sample=0,
        tokens=tokens,
        mask=[0, 0] + [1] * (len(tokens) - 2),
        logprobs=[0.0] * len(tokens),
        prompt_length=2,
        reward=reward,
        status=Status.COMPLETED,
        turns=1,
        messages=[{"role": "user", "content": f"q{uid}"}, {"role": "assistant", "content": text}],
        metadata={"guess": len(text), "error": None},
        steps=[Step(Kind.PROMPT, 0, 2, messages=1), Step(Kind.RESPONSE, 2, len(tokens), messages=1, finish="stop")],
    )
    return Trajectory(Prompt(uid, [], "guess", {}), **{**values, **other})


def healthy(config: Config, share: float | None = None, ending: str = "", noise: float = 0.15) -> Play:
    """Real figures with noise of other seeds; answers are right with the real mean reward, prompts differing."""

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        row = REAL[min(step, len(REAL) - 1)]
        metrics = {
            name: value
            if name.startswith(("rollout/rounds", "rollout/groups"))
            else value * rng.lognormvariate(0, noise)
            for name, value in row.items()
        }
        metrics["policy/ratio"] = 1.0
        p = metrics["reward/mean"] = min(1.0, row["reward/mean"] if share is None else share)
        played = []
        for uid in range(config.data.prompts_per_step):
            right = min(1.0, rng.betavariate(4 * p + 1e-3, 4 * (1 - p) + 1e-3))
            played += [
                said(uid, f"{rng.randrange(10**6)}{ending}", float(rng.random() < right))
                for _ in range(config.data.samples_per_prompt)
            ]
        return metrics, played

    return play


def steps(
    health: Health, play: Play, seed: int, count: int, first: int = 1
) -> Iterator[tuple[set[str], list[str], int]]:
    """Kinds found, lines said and steps stuck, step by step."""
    rng = random.Random(seed)
    for number in range(first, first + count):
        metrics, played = play(rng, number)
        verdict = health.see(number, metrics, played)
        kinds = {name.removeprefix("health/") for name in verdict.metrics if name.startswith("health/")}
        yield kinds - COUNTS, verdict.lines, verdict.stuck


HEALTHY: list[tuple[Config, dict[str, Any]]] = [
    (settings(), {}),
    (settings(64, 8, dynamic=True), {}),
    (settings(8, 8), {}),
    (settings(4, 16), {}),
    (settings(256, 2), {"share": 0.5}),
    (settings(64, 8), {"share": 0.03}),
    (settings(64, 8), {"share": 0.97}),
    (settings(64, 1, advantage="reinforce"), {}),
    (settings(32, 4, stop=["</answer>"]), {"ending": "</answer>"}),
    (settings(16, 8), {"noise": 0.4}),
]


@pytest.mark.parametrize("case", range(len(HEALTHY)))
def test_a_healthy_run_raises_nothing(case: int) -> None:
    config, options = HEALTHY[case]
    for kinds, lines, stuck in steps(Health(config), healthy(config, **options), seed=case, count=60):
        assert (kinds, lines, stuck) == (set(), [], 0)


def test_the_real_run_raises_nothing() -> None:
    health = Health(settings())
    for number, row in enumerate(REAL, start=1):
        found = {name for name in health.see(number, row, []).metrics if name.startswith("health/")}
        assert found == {f"health/{name}" for name in COUNTS}


def every(config: Config, change: Callable[[int, Trajectory], Trajectory | None], **figures: float) -> Play:
    """Healthy steps whose every trajectory is changed, and some figures."""
    whole = healthy(config)

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        metrics, played = whole(rng, step)
        return metrics | figures, [change(i, t) or t for i, t in enumerate(played)]

    return play


def spoiled(config: Config, **figures: float) -> Play:
    """… figures alone: `{}` times the healthy ones where the name says so."""
    times = {name.removesuffix("_times"): value for name, value in figures.items() if name.endswith("_times")}
    fixed = {name: value for name, value in figures.items() if not name.endswith("_times")}
    whole = healthy(config)

    def play(rng: random.Random, step: int) -> tuple[Metrics, list[Trajectory]]:
        metrics, played = whole(rng, step)
        return {**metrics, **{name: metrics[name] * value for name, value in times.items()}, **fixed}, played

    return play


def failing(i: int, t: Trajectory) -> Trajectory | None:
    error = {"error": "environment guess: step raised NameError('\x1b[31mre')", "at": "guess.py, line 9, in step: re.x"}
    return said(t.prompt.uid, "x", 0.0, status=Status.ERROR_ENV, metadata=error) if i % 14 == 3 else None


def unread(i: int, t: Trajectory) -> Trajectory:
    return said(t.prompt.uid, f"Guess \x1b[2J{i}", 0.0, metadata={"guess": None, "error": None})


def cut(i: int, t: Trajectory) -> Trajectory:
    return said(t.prompt.uid, f"and so on {i}", 0.0, status=Status.TRUNCATED_TOKENS)


PLAIN, DYNAMIC = settings(), settings(dynamic=True)
FILTERED, STOPPED = settings(filter=True), settings(stop=["</answer>"])
PLANTED: dict[str, tuple[str, Config, Play, bool, str]] = {
    # case: kind, settings, steps, whether the policy is stuck, part of the line
    "rewards that never differ": (
        "equal_rewards",
        PLAIN,
        every(PLAIN, lambda i, t: said(t.prompt.uid, f"a{i}", 0.0)),
        True,
        "none of 32 groups has rewards that differ: all 128 are 0, of 128 different answers",
    ),
    "the same in steps of four groups": (
        "equal_rewards",
        settings(4, 4),
        every(settings(4, 4), lambda i, t: said(t.prompt.uid, f"a{i}", 0.5)),
        True,
        "none of 4 groups",
    ),
    "a reward that only the prompt decides": (
        "rewards_by_prompt",
        PLAIN,
        every(PLAIN, lambda i, t: said(t.prompt.uid, f"a{i}", t.prompt.uid % 2)),
        True,
        "never between the answers to one",
    ),
    "a parser that reads nothing": (
        "nothing_parsed",
        PLAIN,
        every(PLAIN, unread),
        True,
        "'guess': null of all 128 answers",
    ),
    "everything cut": ("everything_cut", PLAIN, every(PLAIN, cut), True, "128 of 128 responses were cut"),
    "everything cut, and filtered": (
        "everything_cut",
        FILTERED,
        every(FILTERED, lambda i, t: said(t.prompt.uid, f"a{i}", t.reward, status=Status.TRUNCATED_TOKENS)),
        True,
        "takes all of them out of the loss",
    ),
    "more and more cut": (
        "more_cut",
        PLAIN,
        spoiled(PLAIN, **{"rollout/truncated_fraction": 0.7}),
        False,
        "70% of the responses are cut short, 0% were before",
    ),
    "dynamic sampling that finds nothing": (
        "nothing_sampled",
        DYNAMIC,
        every(
            DYNAMIC,
            lambda i, t: said(t.prompt.uid, f"a{i}", 0.0),
            **{"rollout/rounds": 10, "rollout/groups_missing": 32, "rollout/groups_left_out": 32},
        ),
        True,
        "left out 32 of 32 groups",
    ),
    "dynamic sampling that finds little": (
        "groups_missing",
        DYNAMIC,
        spoiled(DYNAMIC, **{"rollout/rounds": 10, "rollout/groups_missing": 20}),
        False,
        "the step has 12 of 32 groups",
    ),
    "an environment that fails": (
        "environment_fails",
        PLAIN,
        every(PLAIN, failing),
        False,
        "9 of 128 trajectories failed, the first one so: environment guess: step raised NameError('\\x1b[31mre') "
        "(at guess.py, line 9, in step: re.x)",
    ),
    "environments that cannot be closed": (
        "close_fails",
        PLAIN,
        every(PLAIN, lambda i, t: said(t.prompt.uid, f"a{i}", t.reward, metadata={"close_error": "close raised"})),
        False,
        "128 environments could not be closed",
    ),
    "programs ended for memory": (
        "ended_for_memory",
        PLAIN,
        spoiled(PLAIN, **{"environment/ended_for_memory": 3.0}),
        False,
        "ended for memory: 3; all that ran at once had more than total_mib",
    ),
    "entropy collapsed": (
        "entropy_collapsed",
        PLAIN,
        spoiled(PLAIN, **{"policy/entropy": 0.002, "reward/mean": 0.3}),
        False,
        "0.002 nats",
    ),
    "gradients vanished": (
        "gradient_vanished",
        PLAIN,
        spoiled(PLAIN, **{"policy/grad_norm": 0.0}),
        True,
        "gradient norm 0.000, where ",
    ),
    "gradients that spike": (
        "gradient_spikes",
        PLAIN,
        spoiled(PLAIN, **{"policy/grad_norm_times": 60}),
        False,
        "is usual; clipped to 1",
    ),
    "a loss that is no number": (
        "not_finite",
        PLAIN,
        spoiled(PLAIN, **{"policy/loss": math.nan, "policy/grad_norm": math.inf}),
        True,
        "policy/loss, policy/grad_norm are NaN",
    ),
    "mismatch rising": (
        "mismatch_rises",
        PLAIN,
        spoiled(PLAIN, **{"mismatch/logprob_abs_mean": 0.02}),
        False,
        "differ by 0.020 nats a token",
    ),
    "an engine with other weights": (
        "mismatch_rises",
        PLAIN,
        spoiled(PLAIN, **{"mismatch/logprob_abs_mean": 2.0}),
        True,
        "differ by 2.000 nats a token",
    ),
    "a stop string that never comes": (
        "stop_string_never_comes",
        STOPPED,
        every(STOPPED, lambda i, t: None),
        False,
        "none of 128 turns has rollout.sampling.stop ('</answer>') in it",
    ),
    "samples that are all alike": (
        "duplicated_samples",
        PLAIN,
        every(PLAIN, lambda i, t: said(t.prompt.uid, f"a{t.prompt.uid}", 0.0)),
        True,
        "alike, in each of 32 groups",
    ),
    "a policy that runs away": (
        "kl_explodes",
        PLAIN,
        spoiled(PLAIN, **{"policy/kl_old": 0.9}),
        False,
        "where the step began is 0.900",
    ),
    "everything clipped": (
        "everything_clipped",
        PLAIN,
        spoiled(PLAIN, **{"policy/clip_fraction": 0.97}),
        True,
        "97% of the tokens",
    ),
    "engines at a tenth of their speed": (
        "slow",
        PLAIN,
        spoiled(PLAIN, **{"time/generate_times": 10}),
        False,
        "for 3 steps",
    ),
}
RELATIVE = {
    "more and more cut",
    "gradients that spike",
    "engines at a tenth of their speed",
    "mismatch rising",
    "entropy collapsed",
}
"""What can only be told from what was usual before."""
CASES = [(name, 15) for name in PLANTED] + [(name, 0) for name in PLANTED if name not in RELATIVE]
"""Planted, and healthy steps before."""


def before(config: Config) -> Play:
    ending = "</answer>" if config.rollout.sampling.stop else ""
    return healthy(config, ending=ending)


@pytest.mark.parametrize(("name", "healthy_steps"), CASES)
def test_a_run_that_goes_wrong_is_named_within_three_steps(name: str, healthy_steps: int) -> None:
    kind, config, play, is_stuck, part = PLANTED[name]
    health = Health(config)
    for found, *_ in steps(health, before(config), seed=1, count=healthy_steps):
        assert not found
    told: list[str] = []
    for found, lines, stuck in steps(health, play, seed=2, count=3, first=healthy_steps + 1):
        assert found <= {kind}, "nothing else is blamed"
        assert bool(stuck) == (is_stuck and found == {kind})
        told += lines
    assert found == {kind}
    assert len(told) == 1, "one line, not one a step"
    [line] = told
    assert line.startswith("health: step ") and f": {kind}: " in line and line.isprintable()
    assert part in line or (kind == "gradient_vanished" and not healthy_steps)
    assert ("the run ends after" in line) == is_stuck


def test_it_is_said_again_after_a_while_and_ends_when_patience_is_out() -> None:
    config = settings(patience=12, groups=300)
    health, lines = Health(config), list[str]()
    play = PLANTED["a parser that reads nothing"][2]
    for number, (_, said_now, stuck) in enumerate(steps(health, play, seed=0, count=12), start=1):
        assert stuck == number
        lines += said_now
        if number < 12:
            health.end_if_stuck(number)
    assert [line.split(":")[1] for line in lines] == [" step 1", f" step {1 + AGAIN}"]
    assert lines[0].endswith("the run ends after 11 more such steps") and lines[1].endswith("after 1 more such step")
    with pytest.raises(CannotLearn, match=r"the last 12 steps up to 12 .*run\.patience = 12.*nothing_parsed: .*null"):
        health.end_if_stuck(12)


@pytest.mark.parametrize("patience", [None, 0])
def test_without_patience_nothing_ends(patience: int | None) -> None:
    health = Health(settings(patience=patience))
    for _, lines, _ in steps(health, PLANTED["rewards that never differ"][2], seed=0, count=60):
        assert not any("the run ends" in line for line in lines)
    health.end_if_stuck(60)


def test_one_step_to_learn_from_starts_the_count_again() -> None:
    health = Health(PLAIN)
    list(steps(health, PLANTED["rewards that never differ"][2], seed=0, count=20))
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
    """The step after which a run ends for want of patience."""
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
    """Healthy steps in which one of `each` groups has an answer that earns something."""
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
        (settings(8, 2), "rewards that never differ", 117),  # told from the third step on; 917 groups of 8
        (settings(32, 4), "rewards that never differ", 29),
        (settings(64, 2), "rewards that never differ", 25),
        (settings(64, 1, advantage="reinforce"), "rewards that never differ", 25),
        (settings(8, 2), "a loss that is no number", 25),  # no luck explains that
        (settings(8, 2), "answers that nobody can read", 25),
        (settings(8, 2), "everything clipped", 26),  # the first step alone says nothing yet
        (settings(8, 2, patience=3, groups=0), "rewards that never differ", 5),
    ],
)
def test_when_a_run_ends_that_cannot_learn(config: Config, name: str, end: int) -> None:
    plays = {
        "rewards that never differ": every(config, lambda i, t: said(t.prompt.uid, f"a{i}", 0.0)),
        "answers that nobody can read": every(
            config, lambda i, t: said(t.prompt.uid, f"a{i}", 0.0, metadata={"parsed_answer": None})
        ),
        "a loss that is no number": spoiled(config, **{"policy/loss": math.nan}),
        "everything clipped": spoiled(config, **{"policy/clip_fraction": 0.97}),
    }
    told = {line for _, lines, _ in steps(Health(config), plays[name], 0, end - 1) for line in lines if "ends" in line}
    assert any(f"the run ends after {end - int(line.split()[2][:-1])} more such step" in line for line in told)
    assert ended(config, plays[name], seed=0, most=end + 1) == end


def test_a_task_that_is_solved_is_not_stuck() -> None:
    health = Health(PLAIN)
    list(steps(health, healthy(PLAIN), seed=0, count=15))
    solved = every(
        PLAIN, lambda i, t: said(t.prompt.uid, f"a{i}", 1.0), **{"reward/mean": 1.0, "policy/grad_norm": 0.0}
    )
    for found, _, stuck in steps(health, solved, seed=0, count=80, first=16):
        assert found == {"nothing_left"} and not stuck


def test_what_a_policy_writes_reaches_a_terminal_as_letters() -> None:
    assert shown("a\x1b[2J\r\n\u202eb\ud800é") == r"'a\x1b[2J\r\n\u202eb\ud800é'"
    assert shown("x" * 500) == "'…" + "x" * 80 + "'"
