"""A slice of the fuzzing, and every case kept from an earlier failure."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.fuzz.__main__ import CASES, fuzz
from tests.fuzz.feed import outcome
from tests.fuzz.targets import TARGETS

SLICE_S = 2.0


def test_a_slice(tmp_path: Path) -> None:
    seed = time.time_ns() % 10**9
    print(f"seed {seed}")
    had, failed = fuzz(list(TARGETS), seed, SLICE_S, tmp_path)
    assert all(share.cases for share in had.values())
    assert not failed, f"seed {seed}: " + failed[0].read_text()[:2000]


def test_what_once_failed() -> None:
    for file in sorted(CASES.glob("*.json")):
        kept = json.loads(file.read_text())
        TARGETS[kept["target"]].prepare()
        assert outcome(kept["target"], kept["case"]) is None, file.name
