"""The trace event format, as read by Perfetto."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

PHASES = {"X", "M", "C", "s", "f", "i"}
SLACK_US = 2.0
"""Tolerance in µs: times have three decimals, and clocks are read one after another."""


def tracks(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the spans of each track by name, and fails on an invalid trace."""
    with gzip.open(file) as text:
        trace = json.load(text)
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= PHASES
    names: dict[int, str] = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M" and event["name"] == "process_name":
            assert event["pid"] not in names, "a track has two names"
            names[event["pid"]] = event["args"]["name"]
        if event["ph"] in "XCsfi":
            assert isinstance(event["ts"], int | float)
    assert len(set(names.values())) == len(names)
    spans_by_track: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans_by_track[names[event["pid"]]].append(event)
    return dict(spans_by_track)


def properly_nested(spans: list[dict[str, Any]]) -> bool:
    """Returns True if the spans of each line are nested or apart, as required for a line."""
    lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        lines[span["tid"]].append(span)
    for line in lines.values():
        open_until: list[float] = []
        for span in sorted(line, key=lambda s: (s["ts"], -s["dur"])):
            while open_until and open_until[-1] <= span["ts"] + SLACK_US:
                open_until.pop()
            end = span["ts"] + span["dur"]
            if open_until and end > open_until[-1] + SLACK_US:
                return False
            open_until.append(end)
    return True


def within(spans: list[dict[str, Any]], outer: dict[str, Any], slack_us: float = SLACK_US) -> bool:
    """Returns True if all spans lie inside the outer span."""
    end = outer["ts"] + outer["dur"]
    return all(outer["ts"] - slack_us <= s["ts"] and s["ts"] + s["dur"] <= end + slack_us for s in spans)
