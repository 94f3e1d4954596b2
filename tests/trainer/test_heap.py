"""Tests of `trainer.heap`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from skyrl_mega.trainer.heap import freeze_heap


class Ring:
    """An object that refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_objects_present_at_the_call_are_collected_by_the_next_call_only() -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    freeze_heap()
    del ring
    gc.collect()
    assert gone() is not None
    freeze_heap()
    assert gone() is None


def test_later_objects_are_collected_as_before() -> None:
    freeze_heap()
    ring = Ring()
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None
