"""Activity counts over time, compared with brute force at every tick of a clock."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.common.safe_read import Malformed
from skyrl_mega.telemetry.concurrency_series import ConcurrencySeries
from skyrl_mega.telemetry.step_timeline import MAX_INTERVALS, StepTimeline, engine_series, loads
from skyrl_mega.telemetry.timeline import MAX_POINTS, MAX_REPORTS, MOMENT_S, ActivityReport, Counter, Timeline
from skyrl_mega.telemetry.trace import Span
from tests.support.machine import within

TICK = 1 / 256
"""Seconds per tick: multiples add up without rounding."""
CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(-3, 3)), max_size=60).map(sorted)
"""(tick, change) pairs in order; `never_below` limits the count to 0."""


class Clock:
    """A clock under manual control."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def never_below(changes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the changes, reduced so that the count never falls below 0."""
    kept, count = [], 0
    for tick, change in changes:
        change = max(change, -count)
        count += change
        kept.append((tick, change))
    return kept


def ticks(changes: list[tuple[int, int]], end: int) -> np.ndarray:
    """Returns the count within each tick."""
    counts = np.zeros(end, dtype=int)
    for tick, change in changes:
        counts[tick:] += change
    return counts


def counted(changes: list[tuple[int, int]], end: int, tick_s: float = TICK) -> ConcurrencySeries:
    counter = Counter(0.0)
    for tick, change in changes:
        counter.add(change, tick * tick_s)
    return counter.take(end * tick_s, 0.0)


@given(CHANGES, st.integers(0, 450), st.integers(0, 450))
def test_all_of_it_is_exact_and_no_stretch_hides_more_than_a_moment(
    changes: list[tuple[int, int]], a: int, b: int
) -> None:
    changes = never_below(changes)
    series, brute = counted(changes, 450), ticks(changes, 450)
    assert series.total(0, 450 * TICK) == pytest.approx(brute.sum() * TICK)
    assert series.busy_s(0, 450 * TICK) == pytest.approx((brute > 0).sum() * TICK)
    a, b = sorted((a, b))
    most = MOMENT_S * max(brute.max(), 1)
    assert abs(series.total(a * TICK, b * TICK) - brute[a:b].sum() * TICK) <= most
    assert abs(series.busy_s(a * TICK, b * TICK) - (brute[a:b] > 0).sum() * TICK) <= MOMENT_S
    for start, end in pairwise(series.times):
        inside = brute[round(start / TICK) : round(end / TICK)]
        assert end - start < MOMENT_S or len(set(inside)) == 1
    assert all(third - first >= MOMENT_S for first, third in zip(series.times[:-1], series.times[2:-1], strict=False))


@given(CHANGES, st.integers(1, 449), st.integers(1, 40))
def test_what_is_cut_joined_and_made_coarser_is_as_much(changes: list[tuple[int, int]], at: int, most: int) -> None:
    changes = never_below(changes)
    series, end = counted(changes, 450), 450 * TICK
    one, two = series.between(0, at * TICK), series.between(at * TICK, end)
    again, coarse = one + two, series.coarser(most + 1)
    assert len(coarse.times) - 1 <= max(most, 1) + 1 and (coarse.times[0], coarse.times[-1]) == (0, end)
    for other in (again, coarse, series.between(-5.0, end + 5.0)):
        assert other.total(-9, 9 + end) == pytest.approx(series.total(0, end))
        assert other.busy_s(-9, 9 + end) == pytest.approx(series.busy_s(0, end))
    assert series.between(-5.0, -1.0).busy_s(-5.0, -1.0) == 0


@given(CHANGES, CHANGES)
def test_counts_of_two_processes_add_up(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    """Adds two series: exact if all changes are apart, within the possible bounds if both change within a moment."""
    left, right = ([(tick, change) for tick, change in never_below(side)] for side in (left, right))
    one, two = counted(left, 450), counted(right, 450)
    both, brute = one + two, ticks(left, 450) + ticks(right, 450)
    assert both.total(0, 2) == pytest.approx(one.total(0, 2) + two.total(0, 2))
    least, most = (f(one.busy_s(0, 2), two.busy_s(0, 2)) for f in (max, lambda a, b: min(2, a + b)))
    assert least - 1e-9 <= both.busy_s(0, 2) <= most + 1e-9
    half = ConcurrencySeries.from_intervals([0, 1], [0.5], [0.5])
    assert (half + half).shares.tolist() == [0.75], "as if independent"
    apart = [(10 * tick, change) for tick, change in left], [(10 * tick, change) for tick, change in right]
    both = counted(apart[0], 4500) + counted(apart[1], 4500)
    brute = ticks(apart[0], 4500) + ticks(apart[1], 4500)
    assert both.busy_s(0, 18) == pytest.approx((brute > 0).sum() * TICK)


def test_a_counter_is_small_however_much_happens() -> None:
    counter, now = Counter(0.0), 0.0
    for i in range(40_000):
        now += 0.03
        counter.add(-1 if i % 2 else 1, now)
    assert len(counter.times) <= MAX_POINTS and counter.moment > MOMENT_S
    series = counter.take(now, 100.0)
    assert series.busy_s(0, 1e9) == pytest.approx(0.03 * 20_000)
    assert (series.times[0], series.times[-1]) == (100.0, 100.0 + now)
    assert counter.moment == MOMENT_S and counter.count == 0


def test_a_timeline_hands_over_what_was_since_the_last_time() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.requests(3, 2)
    timeline.calls(1)
    clock.now = 1.0
    timeline.requests(3, -2)
    clock.now = 4.0
    first = timeline.take()
    assert first.end - first.start == 4.0 and list(first.engines) == [3]
    assert first.engines[3].total(first.start, first.end) == pytest.approx(2.0)
    assert first.environments.total(first.start, first.end) == pytest.approx(4.0)
    clock.now = 6.0
    timeline.requests(5, 1)  # a new engine
    clock.now = 7.0
    second = timeline.take()
    assert second.start == pytest.approx(first.end, abs=10.0) and second.end - second.start == pytest.approx(3.0)
    assert second.environments.busy_s(second.start, second.end) == pytest.approx(3.0), "it is still under way"
    assert second.engines[3].busy_s(second.start, second.end) == 0
    assert second.engines[5].busy_s(second.start, second.end) == pytest.approx(1.0)


def test_what_another_process_has_counted_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("skyrl_mega.telemetry.timeline.time.time", lambda: now[0])
    here, remote = Timeline(lambda: now[0]), Timeline(lambda: now[0])
    here.requests(0, 1)
    remote.requests(0, 3)
    remote.requests(1, 1)
    remote.calls(2)
    now[0] += 0.05
    here.merge(remote.take())
    taken = here.take()
    whole = taken.end - taken.start
    assert taken.engines[0].total(taken.start, taken.end) == pytest.approx(4 * whole, rel=0.2)
    assert taken.engines[0].busy_s(taken.start, taken.end) == pytest.approx(whole, abs=2e-3)
    assert taken.engines[1].total(taken.start, taken.end) == pytest.approx(whole, rel=0.2)
    assert taken.environments.total(taken.start, taken.end) == pytest.approx(2 * whole, rel=0.2)
    clear = here.take()
    assert 1 not in clear.engines, "it is told once"


def test_parts_of_many_processes_are_taken_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges reports of 16 processes, two per second over ten minutes: equal to the total, in little time."""
    draw, zero = np.random.default_rng(0), 1000.0
    here = Timeline(iter([zero, zero + 600.0, zero + 600.0]).__next__)
    monkeypatch.setattr("skyrl_mega.telemetry.timeline.time.time", lambda: zero + 600.0)
    expected, ends = 0.0, np.arange(0.0, 600.5, 0.5) + zero
    for process in range(16):
        for start, end in pairwise(ends):
            inner = np.sort(draw.uniform(start, end, 8))
            counts = draw.integers(0, 3, 9).astype(float)
            one = ConcurrencySeries.from_intervals(np.concatenate([[start], inner, [end]]), counts, counts > 0)
            expected += one.total(start, end)
            here.merge(ActivityReport(start, end, {0: one}, one), process)
        assert len(here._others[process]) <= MAX_REPORTS
    begun = time.process_time()
    taken = here.take()
    assert within(time.process_time() - begun, 3)
    assert taken.engines[0].total(taken.start, taken.end) == pytest.approx(expected, rel=1e-3)
    assert len(taken.engines[0].times) <= 16 * MAX_POINTS + 2


def test_threads_lose_nothing() -> None:
    """Counts from several threads; the clock advances at each look, so every change gets a separate point."""
    timeline, switch_interval = Timeline(itertools.count(0.0, 1.0).__next__), sys.getswitchinterval()

    def work() -> None:
        for _ in range(3000):
            timeline.requests(0, 1)
            timeline.calls(1)
            timeline.calls(-1)
            timeline.requests(0, -1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            environments = timeline.take().environments
            assert (
                len(environments.times) == len(environments.sums) == len(environments.busy)
                and (np.diff(environments.times) > 0).all()
            )
    finally:
        sys.setswitchinterval(switch_interval)
    assert timeline._engines[0].count == 0 and timeline._environments.count == 0


# ---- of a step -----------------------------------------------------------------------------------------------------

LONG = 1 / 16
"""Seconds of a tick longer than a moment: all results are exact."""
PHASES = (("generate", 10), ("residency", 3), ("logprobs", 8), ("values", 4), ("train", 12), ("sync", 6), ("eval", 5))


def made(
    engines: list[list[tuple[int, int]]], calls: list[tuple[int, int]], order: list[int], gap: int
) -> StepTimeline:
    """Returns a step of 450 ticks from tick 20 on, with phases in any order and with gaps."""
    phases, at = [], 20 + gap
    for i in order:
        name, length = PHASES[i]
        phases.append(Span(name, at * LONG, (at + 7 * length) * LONG))
        at += 7 * length + gap
    return StepTimeline(
        step=3,
        shown=0.0,
        start=20 * LONG,
        end=450 * LONG,
        phases=phases,
        engines=[counted(engine, 450, LONG) for engine in engines],
        environments=counted(calls, 450, LONG),
        slots=4,
    )


@given(st.lists(CHANGES, min_size=1, max_size=4), CHANGES, st.permutations(range(len(PHASES))), st.integers(0, 12))
def test_idle_shares_are_those_of_brute_force(
    engines: list[list[tuple[int, int]]], calls: list[tuple[int, int]], order: list[int], gap: int
) -> None:
    engines = [never_below(engine) for engine in engines]
    step = made(engines, never_below(calls), order, gap)
    doing = np.full(450, "", dtype=object)
    for span in step.phases:
        doing[round(span.start / LONG) : round(span.end / LONG)] = span.name
    span = slice(20, 450)
    updated = np.isin(doing, ["sync", "residency"])
    idle = [((ticks(never_below(e), 450) == 0) & ~updated)[span].mean() for e in engines]
    policy = 1 - np.isin(doing, ["sync", "residency", "train", "logprobs"])[span].mean()
    free = 1 - ticks(never_below(calls), 450)[span].mean() / 4
    shares = step.idle()
    assert shares["idle/engines"] == pytest.approx(np.mean(idle))
    assert shares["idle/policy"] == pytest.approx(policy)
    assert shares["idle/environments"] == pytest.approx(min(1, max(0, free)))
    assert shares["idle/bottleneck"] == min(shares["idle/engines"], shares["idle/policy"])
    again = loads(step.dumps())
    assert again.idle() == pytest.approx(shares, abs=0.005)
    assert [(s.name, s.start, s.end) for s in again.phases] == [
        (s.name, pytest.approx(s.start, abs=1e-3), pytest.approx(s.end, abs=1e-3)) for s in step.phases
    ]


def test_engines_that_were_never_asked_are_idle() -> None:
    engines = engine_series({1: ConcurrencySeries.from_intervals([0, 10], [1], [1])}, 4, 0.0, 10.0)
    step = StepTimeline(1, 0.0, 0.0, 10.0, [], engines, ConcurrencySeries.empty(0, 10), 8)
    assert step.idle() == {"idle/engines": 0.75, "idle/policy": 1, "idle/environments": 1, "idle/bottleneck": 0.75}
    assert step.synced is None


def test_a_file_is_small_with_64_engines() -> None:
    random = np.random.default_rng(0)
    times = 1.77e9 + np.cumsum(random.exponential(0.5, MAX_POINTS))
    engines = [
        ConcurrencySeries.from_intervals(times, random.integers(0, 256, MAX_POINTS - 1), np.ones(MAX_POINTS - 1))
        for _ in range(64)
    ]
    step = StepTimeline(1, times[0], times[0], times[-1], [], engines, engines[0], 64)
    data = step.dumps()
    assert len(data) < 100_000
    again = loads(data)
    assert sum(len(e.times) for e in (*again.engines, again.environments)) <= MAX_INTERVALS + 130
    for one, two in zip(step.engines, again.engines, strict=True):
        assert two.total(0, 2e9) == pytest.approx(one.total(0, 2e9), rel=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"end": -1},
        {"end": 0},
        {"slots": 0},
        {"engines": []},
        {"engines": [[[0, 5], [1, 2], [1]]]},
        {"engines": [[[0, 0], [1], [1]]]},
        {"engines": [[[0, 5], [1], [2]]]},
        {"engines": [[[0, 5], ["x"], [1]]]},
        {"engines": [[[0, 0.5], [1], [1]]]},
        {"phases": [["a", 1]]},
        {"phases": [["\x1b[2J", 1, 2]]},
        {"phases": 3},
        {"shown": True},
        {"step": None},
    ],
    ids=str,
)
def test_a_file_that_is_none_is_refused(change: dict[str, object]) -> None:
    tree = json.loads(gzip.decompress(made([[]], [], [0], 0).dumps()))
    loads(gzip.compress(json.dumps(tree).encode()))
    with pytest.raises(Malformed):
        loads(gzip.compress(json.dumps(tree | change).encode()))


def test_half_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made([[]], [], [0], 0).dumps()
    for broken in (data[:-9], b"", b"x" + data):
        with pytest.raises(Malformed):
            loads(broken)
    monkeypatch.setattr("skyrl_mega.telemetry.step_timeline.MAX_BYTES", 40)
    with pytest.raises(Malformed, match="more than 40"):
        loads(data)
