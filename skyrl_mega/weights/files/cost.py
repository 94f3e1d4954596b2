"""Bytes of a sync by files, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.cluster.run_placement import plan_placement
from skyrl_mega.config.schema import Config
from skyrl_mega.weights.files.publish import file_inputs, file_plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs

CHANGES = {"bfloat16": 0.015, "float16": 0.1, "float32": 0.4}
"""Bytes of the changes of a step with a learning rate of 1e-6 over the bytes of the weights, by `model.dtype`
(benchmarks/weight_files.py)."""


def file_bytes(config: Config, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bytes of a sync by files, before compression: `full` of a full image, `changes` of a step (an
    estimate; the full image if every sync is full), `rank`, the most that a policy rank writes, and `worker`, the most
    that an engine worker reads. Rank and worker keep as much in host memory.

    Args:
        config: The settings.
        hf: The model's config.json.

    Raises:
        UserError: The model cannot be split into a layout.
    """
    plan = file_plan(file_inputs(SyncInputs.of(config, hf, plan_placement(config))))
    full = int(plan.parts.nbytes.sum())
    return {
        "full": full,
        "changes": int(full * CHANGES[config.model.dtype]) if config.weights.files.full_every > 1 else full,
        "rank": max(plan.bytes_out),
        "worker": max(plan.bytes_in),
    }


def file_lines(counted: Mapping[str, Any], config: Config) -> list[str]:
    """Returns two lines for people about the result of `file_bytes`, with sizes in GB."""
    every = config.weights.files.full_every
    return [
        f"weights by files: at most {_gb(counted['full'])} GB in a sync of {every}, about "
        f"{_gb(counted['changes'])} GB in each of the others",
        f"  a policy rank writes at most {_gb(counted['rank'])} GB, an engine worker reads at most "
        f"{_gb(counted['worker'])} GB; both keep as much in host memory; seconds depend on the store",
    ]


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g}"
