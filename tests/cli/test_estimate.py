"""Expected values of the dry run, under the names of metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli import dry_run, estimate
from skyrl_mega.config.compose import compose
from skyrl_mega.planner.memory import GIB
from skyrl_mega.report.estimate import read

ROOT = Path(__file__).parents[2]


def plain_values(name: str, *settings: str) -> dict[str, Any]:
    config = compose(ROOT / "configs" / f"{name}.yaml", settings)
    return dry_run.values(config, *dry_run.checked(config))


def test_every_phase_of_a_published_run_is_expected_and_no_more_than_the_dry_runs_peak() -> None:
    v = plain_values("searchr1_30b")
    expected_values = estimate.estimated(v)
    memory = v["policy"][0]["memory"]
    most = max(row["memory"]["peak"] - row["memory"]["reserve"] - row["memory"]["gaps"] for row in v["policy"])
    assert expected_values["memory/policy_train_gib"] == pytest.approx(most / GIB), (
        "without what torch does not give out"
    )
    assert (
        expected_values["memory/policy_generate_gib"]
        < expected_values["memory/policy_logprobs_gib"]
        < expected_values["memory/policy_train_gib"]
    )
    assert expected_values["memory/policy_train_gib"] * GIB < memory["peak"]
    assert expected_values["memory/device_train_gib"] < v["gpu_memory"] / GIB
    phases = sum(expected_values[f"time/{phase}"] for phase in ("generate", "logprobs", "train", "sync", "residency"))
    assert expected_values["time/step"] == pytest.approx(phases)
    assert expected_values["perf/tokens_per_s"] == pytest.approx(
        512 * 5 * v["batch"]["generated"] / expected_values["time/step"]
    )
    assert expected_values["perf/tokens_per_s_per_rank"] == pytest.approx(expected_values["perf/tokens_per_s"] / 32)
    assert 0.02 < expected_values["perf/mfu"] < v["config"]["cluster"]["rates"]["tflops_share"]


def test_on_a_cpu_memory_is_expected_with_the_interpreter_and_seconds_are_not() -> None:
    expected_values = estimate.estimated(plain_values("quickstart"))
    assert 1.0 < expected_values["memory/policy_train_gib"] < 1.5
    assert not [name for name in expected_values if name.startswith(("time/", "perf/"))]


def test_a_run_keeps_it_for_its_report(tmp_path: Path) -> None:
    config = compose(ROOT / "configs" / "quickstart.yaml", [])
    hf, _ = dry_run.checked(config)
    messages: list[str] = []
    estimate.keep(tmp_path, config, hf, messages.append)
    assert messages == [] and read(tmp_path) == json.loads((tmp_path / "estimate.json").read_text())
