"""Runs unable to learn are named within three steps, with evidence; healthy runs raise no alarm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.trainer.health.step_view import quoted
from skyrl_mega.trainer.health.watch import Health
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.trainer.health_steps import (
    COUNTS,
    REAL,
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
        kinds = {name for name in health.check(number, row, []).metrics if name.startswith("health/")}
        assert kinds == {f"health/{name}" for name in COUNTS}


def failing(i: int, t: Trajectory) -> Trajectory | None:
    error = {"error": "environment guess: step raised NameError('\x1b[31mre')", "at": "guess.py, line 9, in step: re.x"}
    return said(t.prompt.uid, "x", 0.0, status=Status.ERROR_ENV, metadata=error) if i % 14 == 3 else None


def failing_in_four_ways(i: int, t: Trajectory) -> Trajectory | None:
    """Fails 20 of 128 trajectories in four ways: 8, 6, 4 and 2 times."""
    if i >= 20:
        return None
    ways = [f"step raised KeyError('key {i}')", "reward = nan", f"step took longer than {i}.5 s", "it is closed"]
    error = ways[[way for way, count in enumerate((8, 6, 4, 2)) for _ in range(count)][i]]
    return said(t.prompt.uid, "x", 0.0, status=Status.ERROR_ENV, metadata={"error": f"environment guess: {error}"})


def cut(i: int, t: Trajectory) -> Trajectory:
    return said(t.prompt.uid, f"and so on {i}", 0.0, status=Status.TRUNCATED_TOKENS)


PLAIN, DYNAMIC = settings(), settings(dynamic=True)
FILTERED, STOPPED = settings(filter=True), settings(stop=["</answer>"])
REPLAYED = settings(replay="rollout")
Case = tuple[str, Config, Play, bool, str]
"""Kind, settings, steps, True if the policy is stuck, part of the line."""


def metrics_of(kind: str, metrics: dict[str, float], part: str, *, stuck: bool = False, config: Config = PLAIN) -> Case:
    """Returns a case of healthy steps with other metrics."""
    return kind, config, spoiled(config, **metrics), stuck, part


def turns_of(
    kind: str,
    turn: Callable[[int, Trajectory], Trajectory | None],
    part: str,
    *,
    stuck: bool = False,
    config: Config = PLAIN,
) -> Case:
    """Returns a case of steps with other trajectories."""
    return kind, config, every(config, turn), stuck, part


PLANTED: dict[str, Case] = {
    "rewards that never differ": (
        "equal_rewards",
        PLAIN,
        equal_rewards(PLAIN),
        True,
        "none of 32 groups has rewards that differ: all 128 are 0, of 128 different answers",
    ),
    "the same in steps of four groups": turns_of(
        "equal_rewards",
        lambda i, t: said(t.prompt.uid, f"a{i}", 0.5),
        "none of 4 groups",
        stuck=True,
        config=settings(4, 4),
    ),
    "a reward that only the prompt decides": turns_of(
        "rewards_by_prompt",
        lambda i, t: said(t.prompt.uid, f"a{i}", t.prompt.uid % 2),
        "never between the answers to the same prompt",
        stuck=True,
    ),
    "greedy answers that earn what all others do": metrics_of(
        "no_advantage",
        {"policy/advantage_fraction": 0.0, "reward/greedy": 0.25},
        "though rewards differ between answers; greedy answers earn 0.25 in the mean",
        stuck=True,
        config=settings(advantage="remax"),
    ),
    "rewards that cancel": metrics_of(
        "no_advantage",
        {"policy/advantage_fraction": 0.0},
        "(algorithm.advantage=gdpo), though rewards differ in",
        stuck=True,
        config=settings(advantage="gdpo"),
    ),
    "an answer that is never the only right one": metrics_of(
        "no_advantage",
        {"policy/advantage_fraction": 0.0},
        "the best answer to a prompt is never the only one",
        config=settings(advantage="pass_at_k"),
    ),
    "a parser that reads nothing": turns_of("nothing_parsed", unread, "'guess': null for all 128 answers", stuck=True),
    "everything cut": turns_of("everything_cut", cut, "128 of 128 responses were cut", stuck=True),
    "everything cut, and filtered": turns_of(
        "everything_cut",
        lambda i, t: said(t.prompt.uid, f"a{i}", t.reward, status=Status.TRUNCATED_TOKENS),
        "takes all of them out of the loss",
        stuck=True,
        config=FILTERED,
    ),
    "more and more cut": metrics_of(
        "more_cut", {"rollout/truncated_fraction": 0.7}, "70% of the responses are cut short, 0% were before"
    ),
    "dynamic sampling that finds nothing": (
        "nothing_sampled",
        DYNAMIC,
        equal_rewards(DYNAMIC, **{"rollout/rounds": 10, "rollout/groups_missing": 32, "rollout/groups_left_out": 32}),
        True,
        "left out 32 of 32 groups",
    ),
    "dynamic sampling that finds little": metrics_of(
        "groups_missing",
        {"rollout/rounds": 10, "rollout/groups_missing": 20},
        "the step has 12 of 32 groups",
        config=DYNAMIC,
    ),
    "an environment that fails": turns_of(
        "environment_fails",
        failing,
        "9 of 128 trajectories failed; the first error: environment guess: step raised NameError('\\x1b[31mre') "
        "(at guess.py, line 9, in step: re.x)",
    ),
    "environments that fail in several ways": turns_of(
        "environment_fails",
        failing_in_four_ways,
        "20 of 128 trajectories failed with 4 different errors, 8 times: environment guess: step raised "
        "KeyError('key 0'); 6 times: environment guess: reward = nan; 4 times: environment guess: step took longer "
        "than 14.5 s; 2 times other errors",
    ),
    "ground truths that fail": turns_of(
        "truth_fails",
        lambda i, t: said(t.prompt.uid, f"a{i}", t.reward, metadata={"gold_error": "no such column: x"}),
        "none of their 128 answers can be right; the first, row 0 of data.train: no such column: x",
    ),
    "environments that cannot be closed": turns_of(
        "close_fails",
        lambda i, t: said(t.prompt.uid, f"a{i}", t.reward, metadata={"close_error": "close raised"}),
        "128 environments could not be closed",
    ),
    "programs ended for memory": metrics_of(
        "ended_for_memory",
        {"environment/ended_for_memory": 3.0},
        "ended for memory: 3, because all programs running at once used more than total_mib",
    ),
    "entropy collapsed": metrics_of("entropy_collapsed", {"policy/entropy": 0.002, "reward/mean": 0.3}, "0.002 nats"),
    "gradients vanished": metrics_of(
        "gradient_vanished", {"policy/grad_norm": 0.0}, "gradient norm 0.000, where ", stuck=True
    ),
    "gradients that spike": metrics_of("gradient_spikes", {"policy/grad_norm_times": 60}, "is usual; clipped to 1"),
    "a loss that is no number": metrics_of(
        "not_finite",
        {"policy/loss": math.nan, "policy/grad_norm": math.inf},
        "policy/loss, policy/grad_norm are NaN",
        stuck=True,
    ),
    "mismatch rising": metrics_of(
        "mismatch_rises", {"mismatch/logprob_abs_mean": 0.02}, "differ by 0.020 nats a token"
    ),
    "an engine with other weights": metrics_of(
        "mismatch_high",
        {"mismatch/logprob_abs_mean": 2.0},
        "differ by 2.000 nats a token in the mean (alarm from 0.050, health.mismatch.alarm_mean): the "
        "engine samples from other",
        stuck=True,
    ),
    "a few tokens that are far off": metrics_of(
        "mismatch_high",
        {"mismatch/logprob_abs_mean": 0.02, "mismatch/logprob_abs_p99": 0.9},
        "differ by 0.900 nats a token at the 99th percentile (alarm from 0.500, health.mismatch.alarm_p99): "
        "the engine samples from other",
    ),
    "routes that are the policy's in no layer but one": metrics_of(
        "routes_differ",
        {f"replay/route_mismatch_layer_{n}": 0.1 * n for n in range(6)},
        "50% of the tokens of layer 5 to other experts than the engine did (alarm from 30%, health.mismatch.alarm_",
        config=REPLAYED,
    ),
    "a stop string that never comes": turns_of(
        "stop_string_never_comes",
        lambda i, t: None,
        "none of 128 turns has rollout.sampling.stop ('</answer>') in it",
        config=STOPPED,
    ),
    "samples that are all alike": turns_of(
        "duplicated_samples",
        lambda i, t: said(t.prompt.uid, f"a{t.prompt.uid}", 0.0),
        "identical, in each of 32 groups",
        stuck=True,
    ),
    "a policy that runs away": metrics_of("kl_explodes", {"policy/kl_old": 0.9}, "where the step began is 0.900"),
    "everything clipped": metrics_of(
        "everything_clipped", {"policy/clip_fraction": 0.97}, "97% of the tokens", stuck=True
    ),
    "engines at a tenth of their speed": metrics_of("slow", {"time/generate_times": 10}, "for 3 steps"),
}
RELATIVE = {
    "more and more cut",
    "gradients that spike",
    "engines at a tenth of their speed",
    "mismatch rising",
    "entropy collapsed",
}
"""Cases recognized only by comparison with earlier steps."""
CASES = [(name, 15) for name in PLANTED] + [(name, 0) for name in PLANTED if name not in RELATIVE]
"""Pairs of (planted case, healthy steps before)."""


def before(config: Config) -> Play:
    ending = "</answer>" if config.rollout.sampling.stop else ""
    return healthy(config, ending=ending)


@pytest.mark.parametrize(("name", "healthy_steps"), CASES)
def test_a_run_that_goes_wrong_is_named_within_three_steps(name: str, healthy_steps: int) -> None:
    kind, config, play, is_stuck, part = PLANTED[name]
    health = Health(config)
    for kinds, *_ in steps(health, before(config), seed=1, count=healthy_steps):
        assert not kinds
    lines_so_far: list[str] = []
    for kinds, lines, stuck in steps(health, play, seed=2, count=3, first=healthy_steps + 1):
        assert kinds <= {kind}, "nothing else is blamed"
        assert bool(stuck) == (is_stuck and kinds == {kind})
        lines_so_far += lines
    assert kinds == {kind}
    assert len(lines_so_far) == 1, "one line, not one a step"
    [line] = lines_so_far
    assert line.startswith("health: step ") and f": {kind}: " in line and line.isprintable()
    assert part in line or (kind == "gradient_vanished" and not healthy_steps)
    assert ("the run ends after" in line) == is_stuck


def test_what_a_policy_writes_reaches_a_terminal_as_letters() -> None:
    assert quoted("a\x1b[2J\r\n\u202eb\ud800é") == r"'a\x1b[2J\r\n\u202eb\ud800é'"
    assert quoted("x" * 500) == "'…" + "x" * 80 + "'"
