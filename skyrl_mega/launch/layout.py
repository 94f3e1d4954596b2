"""The layout of a run as a table: which process sits where and holds which layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.config.derived import policy_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.registry import architecture

COLUMNS = ("rank", "tp", "cp", "dp", "pp", "ep", "etp", "edp", "layers")
SHOWN = 64
"""Ranks in the table for people."""


def seats(config: Config, hf: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per policy rank: its coordinates and the global layer indices of its chunks."""
    parallel = Parallel.from_config(config.policy.layout, policy_ranks(config))
    layers = architecture(hf).describe(hf).layers
    rows = []
    for rank in range(parallel.ranks):
        at = parallel.coordinates(rank)
        chunks = [parallel.stage_layers(layers, at.pp, chunk) for chunk in range(parallel.virtual_pipeline)]
        rows.append({"rank": rank, **at._asdict(), "layers": " ".join(f"{c.start}-{c.stop - 1}" for c in chunks)})
    return rows


def table(config: Config, hf: Mapping[str, Any]) -> str:
    """The rows as aligned text, and the engines in one line."""
    rows = seats(config, hf)
    lines = ["policy"]
    lines += ["".join(name.rjust(6) for name in COLUMNS[:-1]) + "  " + COLUMNS[-1]]
    for row in rows[:SHOWN]:
        lines.append("".join(str(row[name]).rjust(6) for name in COLUMNS[:-1]) + "  " + row["layers"])
    if len(rows) > SHOWN:
        lines.append(f"     … and {len(rows) - SHOWN} more ranks (--json has all)")
    lines.append(f"engines: {config.rollout.engines} × tensor parallel {config.rollout.tensor}")
    return "\n".join(lines)
