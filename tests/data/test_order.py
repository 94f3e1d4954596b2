"""The order of prompts: complete, determined by the seed, resumed at the exact place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.common.errors import UserError
from skyrl_mega.data.order import PromptStream


@given(
    count=st.integers(1, 30),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 9),
    draws=st.lists(st.integers(0, 25), max_size=30),
)
@settings(max_examples=80, deadline=None)
def test_every_epoch_holds_every_prompt_once(count: int, epochs: int, seed: int, draws: list[int]) -> None:
    """Takes any number of prompts per step, stopping and resuming anywhere."""
    stream = PromptStream(count, batch=3, seed=seed, epochs=epochs)
    drawn: list[int] = []
    for n in draws:
        resumed = PromptStream(count, batch=99, seed=seed, epochs=epochs)
        resumed.restore(json.loads(json.dumps(stream.state())))
        part = stream.take(n)
        assert resumed.take(n) == part
        assert len(part) in (0, n)
        drawn += part
    drawn += stream.take(stream.remaining)
    assert len(drawn) == count * epochs and stream.remaining == 0 and stream.take(1) == []
    for epoch in range(epochs):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [PromptStream(50, batch=50, seed=s, epochs=4) for s in (0, 1)]
    drawn = [tuple(stream.take()) for stream in orders for _ in range(4)]
    assert len(set(drawn)) == 8
    assert tuple(PromptStream(50, batch=50, seed=0).take()) == drawn[0]


def test_without_shuffle_the_order_is_the_datas() -> None:
    stream = PromptStream(3, batch=2, shuffle=False, epochs=2)
    assert [stream.take() for _ in range(stream.steps)] == [[0, 1], [2, 0], [1, 2]]
    assert (stream.epoch, stream.take()) == (2, [])


def test_what_was_put_back_comes_first_also_after_a_resume() -> None:
    stream = PromptStream(6, batch=2, shuffle=False)
    assert stream.take(4) == [0, 1, 2, 3]
    stream.put_back([2, 3])
    stream.put_back([1])
    resumed = PromptStream(6, batch=2, shuffle=False)
    resumed.restore(json.loads(json.dumps(stream.state())))
    for each in (stream, resumed):
        assert each.remaining == 5
        assert [each.take(2), each.take(2), each.take(1), each.take(1)] == [[1, 2], [3, 4], [5], []]


@pytest.mark.parametrize("other", [{"count": 11}, {"seed": 1}, {"shuffle": False}])
def test_another_data_set_or_order_is_refused(other: dict[str, int]) -> None:
    settings = {"count": 10, "seed": 0, "shuffle": True}
    state = PromptStream(**settings, batch=2).state()
    with pytest.raises(UserError, match="position in the data has no meaning"):
        PromptStream(**{**settings, **other}, batch=2).restore(state)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PromptStream(0, batch=1)
