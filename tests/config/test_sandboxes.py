"""The planned total resources of sandboxed programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.config.sandboxes import evaluation_trajectories, sandboxes_mib
from skyrl_mega.config.schema import Config

SESSIONS = {"swe": {"session_options": {"total_mib": 1000, "disk_mib": 10}}}
SINGLE = {"python": {"sandbox": {"total_mib": 1000, "disk_mib": 10}}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns evaluation files of 30 and 5 rows, a missing file and an invalid parquet file."""
    folder = tmp_path_factory.mktemp("data")
    names = [str(folder / name) for name in ("a.parquet", "b.parquet", "absent.parquet", "broken.parquet")]
    for name, count in zip(names, (30, 5), strict=False):
        pq.write_table(pa.table({"x": list(range(count))}), name)
    Path(names[3]).write_text("no parquet")
    return names


@pytest.mark.parametrize(
    ("options", "step", "evaluation", "disks"),
    [
        (SESSIONS, (4, 2), {"every": 0, "before": False}, 8),  # no evaluation
        (SESSIONS, (4, 2), {}, 35),
        (SESSIONS, (4, 2), {"every": 0}, 35),  # before the first step
        (SESSIONS, (4, 2), {"before": False}, 35),
        (SESSIONS, (4, 2), {"samples": 3}, 105),
        (SESSIONS, (4, 2), {"samples": 3, "limit": 10}, 105),  # 10, 5, and 10 for each of two possible files
        (SESSIONS, (4, 2), {"limit": 2}, 8),
        (SESSIONS, (10, 8), {}, 80),  # a step needs more
        (SINGLE, (4, 2), {}, 35),
        (SINGLE, (4, 2), {"samples": 3}, 64),  # no more run at once
        (SINGLE, (4, 2), {"every": 0, "before": False}, 8),
    ],
)
def test_evaluations_open_sandboxes_too(
    files: list[str], options: dict[str, Any], step: tuple[int, int], evaluation: dict[str, Any], disks: int
) -> None:
    config = Config()
    config.environment.options, config.data.eval = options, files
    config.data.prompts_per_step, config.data.samples_per_prompt = step
    for name, value in evaluation.items():
        setattr(config.evaluation, name, value)
    assert sandboxes_mib(config) == 1000 + 10 * disks
    assert sandboxes_mib(config, trajectories=3) == 1000 + 10 * 3


def test_no_more_disks_than_workers() -> None:
    config = Config()
    config.environment.options = SINGLE
    for workers in (5, 100):
        config.environment.workers = workers
        assert sandboxes_mib(config, trajectories=80) == 1000 + 10 * min(workers, 80)


def test_the_usual_sum_is_planned_by_the_nodes_memory() -> None:
    config = Config()
    config.environment.default = "python"
    for node_gib, total in ((60, 8192), (128, 16384), (1000, 32768)):
        config.cluster.host_memory_gib = node_gib
        assert sandboxes_mib(config) == total + 64 * 64
    config.environment.default = None
    assert sandboxes_mib(config) == 0 and evaluation_trajectories(config) == 0


def test_no_more_sessions_than_slots() -> None:
    config = Config()
    config.environment.options = {"swe": {"session_options": {"total_mib": 1000, "disk_mib": 10}}}
    assert sandboxes_mib(config, trajectories=80) == 1000 + 10 * 80
    config.environment.slots = 7
    assert sandboxes_mib(config, trajectories=80) == 1000 + 10 * 7


def test_steps_that_are_ahead_have_sessions_too() -> None:
    config = Config()
    config.environment.options = {"swe": {"session_options": {"total_mib": 1000, "disk_mib": 10}}}
    config.data.prompts_per_step, config.data.samples_per_prompt = 10, 8
    config.asynchrony.max_staleness = 2
    for mode, steps in (("off", 1), ("one_step", 1), ("full", 3)):
        config.asynchrony.mode = mode
        assert sandboxes_mib(config) == 1000 + 10 * 80 * steps
    config.run.steps = 2
    assert sandboxes_mib(config) == 1000 + 10 * 80 * 2, "no more than the run has"
    config.data.eval, config.evaluation.limit = ["nowhere.parquet"], 50
    assert sandboxes_mib(config) == 1000 + 10 * (80 * 2 + evaluation_trajectories(config)), (
        "an evaluation is played beside them"
    )
    config.environment.slots = 100
    assert sandboxes_mib(config) == 1000 + 10 * 100
