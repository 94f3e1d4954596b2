"""Asserts on CPU time in tests: they use `tests.support.machine.within`, which allows for slow machines."""

from __future__ import annotations

import re

from tests.architecture.source import ROOT

FIXED = re.compile(r"assert (?!within\().*(?:process|thread)_time\(\).* <=? ")
"""An assert that compares CPU time with a fixed number of seconds, on one line."""


def test_no_limit_on_cpu_time_is_fixed() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [f"{file.relative_to(ROOT)}: {line}" for file in files for line in FIXED.findall(file.read_text())]
    assert found == []


def test_a_planted_fixed_limit_is_found() -> None:
    planted = "    assert time.process_time() - start"
    assert FIXED.search(planted + " < 3") and not FIXED.search("    assert within(time.process_time() - start, 3)")
