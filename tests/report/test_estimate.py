"""Expected values next to measured values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.report import estimate, overview, run_data
from tests.report.cases import metrics, run_folder

ROWS: list[dict[str, float | None]] = [
    {"step": 0, "eval/x/mean": 1.0},
    {"step": 1, "time/train": 60.0, "memory/policy_train_gib": 9.0, "reward/mean": 0.0},
    {"step": 2, "time/train": 4.0, "memory/policy_train_gib": 30.0, "perf/mfu": 0.25, "reward/mean": 0.0},
    {"step": 3, "time/train": 8.0, "memory/policy_train_gib": 32.0, "perf/mfu": None, "reward/mean": 0.0},
    {"step": 4, "time/train": 5.0, "memory/policy_train_gib": 33.0, "reward/mean": 0.0},
]
EXPECTED = {"time/train": 10.0, "time/sync": 0.5, "memory/policy_train_gib": 40.0, "perf/mfu": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = run_folder(tmp_path / "r")
    metrics(run, ROWS)
    (run / estimate.FILE).write_text(json.dumps(EXPECTED))
    return run


def test_measured_is_the_median_after_the_first_step(folder: Path) -> None:
    assert list(estimate.rows(run_data.read(folder), estimate.read(folder))) == [
        ("time/train", 10.0, 5.0),
        ("time/sync", 0.5, None),
        ("memory/policy_train_gib", 40.0, 32.0),
        ("perf/mfu", 0.5, 0.25),
    ]


def test_the_page_shows_both_and_their_ratio(folder: Path) -> None:
    page = overview.page([run_data.read(folder)])
    assert "Estimated and measured" in page
    assert "<tr><th>memory/policy_train_gib</th><td>40.000</td><td>32.000</td><td>0.80</td></tr>" in page
    assert "<tr><th>time/sync</th><td>0.500</td><td>·</td><td>·</td></tr>" in page


def test_a_run_without_an_estimate_has_no_table_and_a_broken_one_is_named(folder: Path) -> None:
    (folder / estimate.FILE).write_text('{"time/train": "<b>", "x": true, "time/sync": 1}')
    assert estimate.read(folder) == {"time/sync": 1.0}
    (folder / estimate.FILE).write_text("[1")
    with pytest.raises(UserError, match=r"estimate\.json"):
        overview.page([run_data.read(folder)])
    (folder / estimate.FILE).unlink()
    assert "Estimated and measured" not in overview.page([run_data.read(folder)])
