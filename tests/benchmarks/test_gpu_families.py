"""The proofs `families` and `te_families`: every family has a model, and a wrong number fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.families import MODELS, compare, cut, with_all_experts
from benchmarks.gpu.proof import Bench
from skyrl_mega.models.registry import ARCHITECTURES, architecture
from skyrl_mega.parallel.dims import ParallelDims


def test_every_family_has_a_model() -> None:
    models = [cut(name) for name in MODELS]
    for hf in (*models, *map(with_all_experts, models)):
        architecture(hf).check_layout(hf, ParallelDims())
    families = {hf["model_type"] for hf in models} | {hf.get("text_config", hf)["model_type"] for hf in models}
    assert families == set(ARCHITECTURES)


@pytest.fixture
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns simulated results of a device and of the CPU, with rounding errors of their own."""
    rng = np.random.default_rng(0)
    exact: dict[str, Any] = {
        "log-probs": rng.normal(size=500),
        "gradients": {name: rng.normal(size=200) for name in "abc"},
    }

    def rounded(error: float) -> dict[str, Any]:
        gradients = {name: g + error * rng.normal(size=200) for name, g in exact["gradients"].items()}
        return {"log-probs": exact["log-probs"] + error * rng.normal(size=500), "gradients": gradients}

    here = {"exact": rounded(1e-6), "rounded": rounded(0.03), "chosen": rounded(0.03)}
    return here, {"exact": exact, "spread": exact, "rounded": rounded(0.03), "chosen": rounded(0.03)}


def wrong(folder: Path, here: dict[str, Any], by_cpu: dict[str, Any]) -> list[str]:
    events = folder / "events"
    events.write_text("")
    compare(Bench(events, folder, tiny=False), "a", here, by_cpu)
    return [event["wrong"] for event in map(json.loads, events.read_text().splitlines()) if "wrong" in event]


def test_rounding_passes(tmp_path: Path, results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert wrong(tmp_path, *results) == []


@pytest.mark.parametrize("kind", ["exact", "rounded"])
def test_one_wrong_gradient_fails(tmp_path: Path, results: tuple[dict[str, Any], dict[str, Any]], kind: str) -> None:
    here, by_cpu = results
    here[kind]["gradients"]["b"] *= 1.2
    (mistake,) = wrong(tmp_path, here, by_cpu)
    assert "worst gradient" in mistake


@pytest.mark.parametrize("kind", ["exact", "rounded", "chosen"])
def test_wrong_log_probs_fail(tmp_path: Path, results: tuple[dict[str, Any], dict[str, Any]], kind: str) -> None:
    here, by_cpu = results
    here[kind]["log-probs"] += 0.15
    (mistake,) = wrong(tmp_path, here, by_cpu)
    assert "log-probs" in mistake


def test_a_parameter_of_one_side_alone_is_an_error(
    tmp_path: Path, results: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    here, by_cpu = results
    del here["rounded"]["gradients"]["c"]
    with pytest.raises(KeyError, match="c"):
        wrong(tmp_path, here, by_cpu)
