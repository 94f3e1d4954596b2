"""What the dry run expects of a run, under the names of its metrics: kept in the run's folder when it starts, so that
the report can show both beside each other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.cli import dry_run
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.planner.host_memory import PROCESS
from skyrl_mega.planner.memory import GIB
from skyrl_mega.report.estimate import FILE

PHASES = {"generate": "generate", "log-probs": "logprobs", "train": "train", "sync": "sync"}
"""The planner's phases, and what metrics call them."""


def keep(folder: Path, config: Config, hf: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Writes the estimate into a run's folder. A run is not refused over it."""
    try:
        found = estimated(dry_run.values(config, hf))
        partial = folder / f"{FILE}.partial"
        partial.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(partial, folder / FILE)
    except (UserError, OSError) as error:
        say(f"note: there is no estimate to compare the run with: {error}")


def estimated(v: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name, from the plain values of a dry run (`dry_run.values`). Seconds only where rates are known, that
    is not on a CPU."""
    found = _speed(v) if v["seconds"] else {}
    process = 0 if v["gpu_memory"] else PROCESS["cpu"]
    """A policy process on a CPU has its interpreter and libraries in the same memory."""
    memory: dict[str, float] = {}
    for role, phases in (
        ("policy", {"generate": "generate", "logprobs": "logprobs", "train": "train", "sync": "sync"}),
        ("reference", {"logprobs": "logprobs"}),
        ("critic", {"generate": "generate", "logprobs": "values", "train": "critic"}),
    ):
        for row in v[role]:
            for phase, size in _policy(row["memory"]).items():
                if phase in phases:
                    name = f"memory/{role}_{phases[phase]}_gib"
                    memory[name] = max(memory.get(name, 0), size + process)
    workers = [row["memory"] for row in v["engines"]["workers"]]
    memory["memory/engine_generate_gib"] = max(m["weights"] + m["working"] + m["kv"] for m in workers) + process
    memory["memory/engine_sync_gib"] = max(m["weights"] + m["kv"] + m["sync"] for m in workers) + process
    memory["memory/host_gib"] = max(node["host_memory_total"] for node in v["nodes"])
    if shared := v["shared"]:
        for phase, name in PHASES.items():
            memory[f"memory/device_{name}_gib"] = shared["policy"][phase] + shared["engine"] + shared["beside"]
    return found | {name: size / GIB for name, size in memory.items()}


def _speed(v: Mapping[str, Any]) -> dict[str, float]:
    seconds, batch, engines = v["seconds"], v["batch"], v["engines"]
    written = batch["sequences"] * batch["generated"]
    return {
        **{f"time/{phase}": seconds[phase] for phase in ("generate", "logprobs", "train", "sync", "step")},
        "perf/mfu": seconds["mfu"],
        "perf/tokens_per_s": written / seconds["step"],
        "perf/tokens_per_s_per_rank": seconds["tokens_per_second_per_gpu"] * batch["generated"] / batch["mean"],
        "perf/generate_tokens_per_s": written / seconds["generate"],
        "perf/decode_tokens_per_s_per_engine": written / seconds["generate"] / engines["count"],
        "perf/tokens_per_engine_step": engines["usual"] * engines["tensor"] / len(engines["workers"]),
    }


def _policy(m: Mapping[str, Any]) -> dict[str, float]:
    """What torch gives out in each phase: without what CUDA and libraries take, and what the allocator cannot use."""
    held = m["weights"] + m["gradients"] + m["optimizer"] + m["sync"]
    return {
        "generate": held,
        "logprobs": held + m["reference"] + m["forward"],
        "train": held + m["activations"] + m["logits"],
        "sync": held,
    }
