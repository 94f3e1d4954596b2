"""Steps sent to a tracker: each exactly once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from skyrl_mega.telemetry.trackers.sent_steps import SentSteps


def test_every_step_passes_once(tmp_path: Path) -> None:
    file, stored = tmp_path / "trackers" / "store.json", list[tuple[int, int | None]]()
    for start, end in ((None, 4), (2, 3), (2, 6), (6, 8)):  # killed after step 4, after step 3, after step 6
        once = SentSteps(file)
        assert (once.resume(start) is None) == (start is None)
        if start is None:
            once.begin("an id")
        for step in range((start or 0) + 1, end + 1):
            once.send_once(step, partial(stored.append, (step, start)))
    assert stored == [(1, None), (2, None), (3, None), (4, None), (5, 2), (6, 2), (7, 6), (8, 6)]


def test_what_was_not_taken_is_given_again(tmp_path: Path) -> None:
    once = SentSteps(tmp_path / "store.json")
    once.begin("an id")
    calls: list[str] = []

    def fail() -> None:
        calls.append("failed")
        raise OSError

    with pytest.raises(OSError):
        once.send_once(0, fail)
    once.send_once(0, lambda: calls.append("sent"))
    once.send_once(0, lambda: calls.append("repeated"))
    assert calls == ["failed", "sent"]


def test_a_run_from_its_beginning_is_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "store.json"
    SentSteps(file).begin("first")
    once = SentSteps(file)
    assert once.resume(None) is None
    once.begin("second")
    once.send_once(3, lambda: None)
    again = SentSteps(file)
    assert again.resume(1) == "second"
    assert again.skipped_text(1) == "; steps 2 to 3 are repeated now, and not written there again"
    assert again.skipped_text(3) == ""
