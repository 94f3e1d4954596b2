"""Estimates of a run's metrics from the dry run, written to the run's folder at the start for comparison in the
report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.cli import dry_run
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.planner.host_memory import PROCESS
from skyrl_mega.planner.memory import GIB
from skyrl_mega.report.estimate import FILE

OUTSIDE_TORCH = {"reserve", "gaps", "beside"}
"""Kinds of memory outside torch's accounting (CUDA, libraries, allocator gaps), so no metric of a process includes
them."""


def keep(folder: Path, config: Config, hf: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Computes the dry run's estimates and writes them to `estimate.json` in a run's folder, for the report.

    If the settings cannot be estimated (UserError) or the file cannot be written, prints a note instead of raising. An
    existing file is replaced.

    Args:
        folder: The run's folder.
        config: The settings.
        hf: The model's config.json.
        say: Prints a line.
    """
    try:
        estimate = estimated(dry_run.values(config, hf))
        partial = folder / f"{FILE}.partial"
        partial.write_text(json.dumps(estimate, indent=1) + "\n")
        os.replace(partial, folder / FILE)
    except (UserError, OSError) as error:
        say(f"note: there is no estimate to compare the run with: {error}")


def estimated(v: Mapping[str, Any]) -> dict[str, float]:
    """Returns metric name → estimate, from the values of a dry run (`dry_run.values`); memory is in GiB, times are in
    seconds.

    Times and speeds are included on GPUs, and on a CPU with measured rates (`cluster.rates_file`).
    """
    metrics = _speed(v) if v["seconds"] else {}
    process = 0 if v["gpu_memory"] else PROCESS["cpu"]
    # On a CPU, interpreter and libraries use the same memory.
    memory: dict[str, float] = {}
    for role in ("policy", "reference", "critic"):
        for row in v[role]:
            for phase, kinds in row["memory"]["phases"].items():
                if (role, phase) != ("reference", "generate"):
                    name = f"memory/{role}_{phase}_gib"
                    memory[name] = max(memory.get(name, 0), _torch_bytes(kinds) + process)
    workers = [row["memory"] for row in v["engines"]["workers"]]
    if v["engines"]["count"]:
        memory["memory/engine_generate_gib"] = max(_torch_bytes(m["phases"]["generate"]) for m in workers) + process
    resident = not v["gpu_memory"] or v["config"]["residency"]["keep"] is None
    if v["engines"]["count"] and resident:  # else torch counts unmapped memory
        memory["memory/engine_sync_gib"] = max(_torch_bytes(m["phases"]["sync"]) + m["sync"] for m in workers) + process
    memory["memory/host_gib"] = max(node["host_memory_total"] for node in v["nodes"])
    if shared := v["shared"]:
        for phase in shared["policy"]:
            both = shared["policy"][phase] + shared["engine"][phase]
            memory[f"memory/device_{phase}_gib"] = both + shared["beside"]
    return metrics | {name: size / GIB for name, size in memory.items()}


def _speed(v: Mapping[str, Any]) -> dict[str, float]:
    seconds, batch, engines = v["seconds"], v["batch"], v["engines"]
    written = batch["sequences"] * batch["generated"]
    phases = ("logprobs", "train", "sync", "residency", "other", "step")
    metrics = {
        "time/generate": seconds["generate"] + seconds["tools"] - seconds["ahead"],  # only the time the policy waits
        **{f"time/{phase}": seconds[phase] for phase in phases},
        **({"perf/mfu": seconds["mfu"]} if v["gpu_memory"] else {}),  # no peak of a CPU is known
        "perf/tokens_per_s": written / seconds["step"],
        "perf/tokens_per_s_per_rank": seconds["tokens_per_second_per_gpu"] * batch["generated"] / batch["mean"],
    }
    if seconds["ahead"]:  # engines work in all phases of a step, so no engine rate is measured
        return metrics
    count = max(1, engines["count"] + engines["servers"])
    return metrics | {
        "perf/generate_tokens_per_s": written / (seconds["generate"] + seconds["tools"]),
        "perf/decode_tokens_per_s_per_engine": written / seconds["generate"] / count,
        "perf/tokens_per_engine_step": engines["usual"] * engines["tensor"] / len(engines["workers"]),
    }


def _torch_bytes(kinds: Mapping[str, float]) -> float:
    """Returns the bytes visible to torch's allocator."""
    return sum(size for kind, size in kinds.items() if kind not in OUTSIDE_TORCH)
