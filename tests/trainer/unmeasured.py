"""Measurements for runs without actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def unmeasured() -> Any:
    """Returns a stand-in for `Run.measurements` without measurements."""
    return SimpleNamespace(
        begin=lambda step, discard_earlier: None,
        end_phase=lambda phase: None,
        metrics_of=lambda step: {},
        draft_change=lambda step: None,
        write_recordings=lambda step: {},
    )
