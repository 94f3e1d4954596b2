"""Turns go back to the engine that knows their beginning, unless it is too busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.engines.base import Request
from skyrl_mega.rollout import homes
from skyrl_mega.rollout.homes import FEW, LONG, SHARE, Homes


def turn(name: str, length: int = 10, prompt: int | None = None) -> Request:
    return Request(name, range(length), 5, 0, prompt=prompt)


def test_a_turn_goes_back_to_the_engine_of_the_one_before() -> None:
    known = Homes()
    assert known.choose(turn("a/0"), {0: 3, 1: 2}) == 1
    assert known.choose(turn("a/1"), {0: 1, 1: 2}) == 1
    assert known.choose(turn("b/0"), {0: 1, 1: 2}) == 0


def test_not_where_that_one_is_too_busy_or_gone() -> None:
    known = Homes()
    known.choose(turn("a/0"), {0: 0, 1: 1})
    assert known.choose(turn("a/1"), {0: 100 + 25, 1: 100}) == 0
    assert known.choose(turn("a/2"), {0: 100 + 26, 1: 100}) == 1
    assert known.choose(turn("a/3"), {0: 0, 1: FEW}) == 1
    assert known.choose(turn("a/4"), {0: 0}) == 0


def test_samples_of_a_long_prompt_go_together() -> None:
    known = Homes()
    assert known.choose(turn("a/0", LONG, prompt=7), {0: 3, 1: 2}) == 1
    assert known.choose(turn("b/0", LONG, prompt=7), {0: 3, 1: 4}) == 1
    assert known.choose(turn("c/0", LONG, prompt=8), {0: 3, 1: 4}) == 0
    assert known.choose(turn("d/0", LONG - 1, prompt=9), {0: 3, 1: 4}) == 0
    assert known.choose(turn("e/0", LONG - 1, prompt=9), {0: 5, 1: 4}) == 1


def test_what_is_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "KNOWN", 2)
    known = Homes()
    for name in ("a/0", "b/0", "a/1", "c/0"):
        known.choose(turn(name), {0: 0, 1: 1})
    assert list(known.engines) == ["a", "c"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4), st.integers(0, 3)), max_size=300))
def test_no_engine_is_given_much_more_than_another(turns: list[tuple[int, int, int]]) -> None:
    """However often the same few ask, and whatever ends meanwhile."""
    known, requests = Homes(), dict.fromkeys(range(4), 0)
    for number, (trajectory, prompt, ended) in enumerate(turns):
        least = min(requests.values())
        chosen = known.choose(turn(f"{trajectory}/{number}", LONG, prompt), requests)
        assert requests[chosen] <= least + max(FEW, SHARE * least)
        requests[chosen] += 1
        requests[ended] = max(0, requests[ended] - 1)
