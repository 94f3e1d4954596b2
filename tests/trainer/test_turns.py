"""A run whose parts take turns in memory gives the figures of a run with all parts resident: every engine, rank and
step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.telemetry.metrics import read
from tests.trainer.quickstart import THREE_STEPS, differing, exported, finish


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's metrics without speed and memory."""
    return {
        name: value
        for name, value in row.items()
        if name.split("/")[0] not in ("time", "perf", "memory", "idle", "residency")
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_learns_the_same_with_everything_taking_turns(undisturbed: Path, tmp_path: Path) -> None:
    finish(tmp_path, "run.name=run", *THREE_STEPS, "residency.keep=[]")
    turns, stays = (read(run / "metrics.jsonl") for run in (tmp_path / "run", undisturbed))
    assert differing(exported(tmp_path / "run"), exported(undisturbed)) == []
    assert [figures(row) for row in turns] == [figures(row) for row in stays]
    assert turns[-1]["policy/grad_norm"] > 0 and turns[-1]["residency/bytes_in"] > 1e5, "learned, and parts have moved"
    assert not any(name.startswith(("residency/", "time/residency")) for row in stays for name in row)
