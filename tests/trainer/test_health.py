"""Runs unable to learn are named within three steps, with evidence; healthy runs raise no alarm."""

from __future__ import annotations

import math
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
PLANTED: dict[str, tuple[str, Config, Play, bool, str]] = {
    # case: kind, settings, steps, True if the policy is stuck, part of the line
    "rewards that never differ": (
        "equal_rewards",
        PLAIN,
        equal_rewards(PLAIN),
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
        "never between the answers to the same prompt",
    ),
    "greedy answers that earn what all others do": (
        "no_advantage",
        settings(advantage="remax"),
        spoiled(settings(advantage="remax"), **{"policy/advantage_fraction": 0.0, "reward/greedy": 0.25}),
        True,
        "though rewards differ between answers; greedy answers earn 0.25 in the mean",
    ),
    "rewards that cancel": (
        "no_advantage",
        settings(advantage="gdpo"),
        spoiled(settings(advantage="gdpo"), **{"policy/advantage_fraction": 0.0}),
        True,
        "(algorithm.advantage=gdpo), though rewards differ in",
    ),
    "an answer that is never the only right one": (
        "no_advantage",
        settings(advantage="pass_at_k"),
        spoiled(settings(advantage="pass_at_k"), **{"policy/advantage_fraction": 0.0}),
        False,
        "the best answer to a prompt is never the only one",
    ),
    "a parser that reads nothing": (
        "nothing_parsed",
        PLAIN,
        every(PLAIN, unread),
        True,
        "'guess': null for all 128 answers",
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
        equal_rewards(DYNAMIC, **{"rollout/rounds": 10, "rollout/groups_missing": 32, "rollout/groups_left_out": 32}),
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
        "9 of 128 trajectories failed; the first error: environment guess: step raised NameError('\\x1b[31mre') "
        "(at guess.py, line 9, in step: re.x)",
    ),
    "environments that fail in several ways": (
        "environment_fails",
        PLAIN,
        every(PLAIN, failing_in_four_ways),
        False,
        "20 of 128 trajectories failed with 4 different errors, 8 times: environment guess: step raised "
        "KeyError('key 0'); 6 times: environment guess: reward = nan; 4 times: environment guess: step took longer "
        "than 14.5 s; 2 times other errors",
    ),
    "ground truths that fail": (
        "truth_fails",
        PLAIN,
        every(PLAIN, lambda i, t: said(t.prompt.uid, f"a{i}", t.reward, metadata={"gold_error": "no such column: x"})),
        False,
        "none of their 128 answers can be right; the first, row 0 of data.train: no such column: x",
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
        "ended for memory: 3, because all programs running at once used more than total_mib",
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
        "mismatch_high",
        PLAIN,
        spoiled(PLAIN, **{"mismatch/logprob_abs_mean": 2.0}),
        True,
        "differ by 2.000 nats a token in the mean (alarm from 0.050, health.mismatch.alarm_mean): the "
        "engine samples from other",
    ),
    "a few tokens that are far off": (
        "mismatch_high",
        PLAIN,
        spoiled(PLAIN, **{"mismatch/logprob_abs_mean": 0.02, "mismatch/logprob_abs_p99": 0.9}),
        False,
        "differ by 0.900 nats a token at the 99th percentile (alarm from 0.500, health.mismatch.alarm_p99): "
        "the engine samples from other",
    ),
    "routes that are the policy's in no layer but one": (
        "routes_differ",
        REPLAYED,
        spoiled(REPLAYED, **{f"replay/route_mismatch_layer_{n}": 0.1 * n for n in range(6)}),
        False,
        "50% of the tokens of layer 5 to other experts than the engine did (alarm from 30%, health.mismatch.alarm_",
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
        "identical, in each of 32 groups",
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
