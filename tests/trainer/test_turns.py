"""A run whose parts take turns in memory has the figures of one whose parts all stay: every engine, rank and step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.quickstart import finish

STEPS = [
    "run.name=run",
    "run.steps=3",
    "evaluation.every=2",
    "checkpoint.every=2",
    "algorithm.dynamic_sampling.enabled=false",
    "algorithm.entropy.coefficient=0.01",  # teaches where no reward does yet
]


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """What is measured of the run, and not of its speed and memory."""
    return {
        name: value
        for name, value in row.items()
        if name.split("/")[0] not in ("time", "perf", "memory", "idle", "residency")
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_learns_the_same_with_everything_taking_turns(tmp_path: Path) -> None:
    found = {}
    for name, settings in {"stays": [], "turns": ["residency.keep=[]"]}.items():
        (tmp_path / name).mkdir()
        finish(tmp_path / name, *STEPS, *settings)
        found[name] = rows(tmp_path / name)
    assert [figures(row) for row in found["turns"]] == [figures(row) for row in found["stays"]]
    last = found["turns"][-1]
    assert last["policy/grad_norm"] > 0 and last["residency/bytes_in"] > 1e5, "it has learned, and parts have moved"
    assert not any(name.startswith(("residency/", "time/residency")) for row in found["stays"] for name in row)
