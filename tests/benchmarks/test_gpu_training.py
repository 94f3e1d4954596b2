"""The proofs `training` and `te_adam`: differences by rounding pass, larger differences fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.proof import Bench
from benchmarks.gpu.training import compare

LOSSES = np.array([5e-4, 1.7e-3, 2.0e-3])
NORMS = np.array([2.3e-3, 7.6e-3, 1.1e-2])
"""Relative errors of bfloat16 in three steps on a CPU: root mean squares over seeds of model and data."""


def _told(rng: np.random.Generator, exact: dict[str, Any] | None = None, norm: float = 1.0) -> dict[str, Any]:
    """Returns simulated measurements: exact values, or `exact` with bfloat16's errors."""
    if exact is None:
        simulated: dict[str, Any] = {name: rng.normal(size=4000) for name in ("log-probs", "entropy")}
        return simulated | {"gradients": {"w": rng.normal(size=4000)}, "losses": [5.0] * 3, "gradient norms": [1.0] * 3}
    simulated = {name: exact[name] + rng.normal(size=4000) * 0.1 for name in ("log-probs", "entropy")}
    simulated["gradients"] = {"w": exact["gradients"]["w"] + rng.normal(size=4000) * 0.1}
    simulated["losses"] = list(5.0 * (1 + rng.normal(size=3) * LOSSES))
    return simulated | {"gradient norms": list(norm * (1 + rng.normal(size=3) * NORMS))}


def _wrong(path: Path, device: dict[str, Any], cpu: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    events = path / "events"
    events.write_text("")
    compare(Bench(events, path, tiny=False), {"bfloat16": device}, {"bfloat16": cpu, "float32": exact})
    recorded = [json.loads(line) for line in events.read_text().splitlines()]
    return [event["wrong"] for event in recorded if "wrong" in event]


def test_a_device_that_rounds_as_well_as_a_cpu_passes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    exact = _told(rng)
    for _ in range(300):
        assert _wrong(tmp_path, _told(rng, exact), _told(rng, exact), exact) == []


def test_a_gradient_norm_that_is_a_seventh_too_large_fails(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    exact = _told(rng)
    (mistake,) = _wrong(tmp_path, _told(rng, exact, norm=1.15), _told(rng, exact), exact)
    assert "gradient norms" in mistake
