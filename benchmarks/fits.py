"""Computes the published recipes' use of GPU memory, with policy and engines in turns and with everything resident.

    .venv/bin/python -m benchmarks.fits

Uses the dry run, on any machine; nothing is started. Exits with 1 if a recipe does not fit. Writes
benchmarks/results/fits.json and the table of docs/recipes.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from skyrl_mega.cli import dry_run
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fits.json"
PAGE = ROOT / "docs" / "recipes.md"
MARKS = ("<!-- python -m benchmarks.fits -->", "<!-- end -->")
ALONE = {
    "searchr1_30b": 0.3,
    "searchr1_3b": 0.45,
    "skyrl_sql_7b": 0.55,
    "dapo": 0.3,
    "dapo_7b": 0.6,
    "dapo_4b": 0.75,
    "dapo_4b_one_node": 0.75,
    "dapo_1.7b": 0.75,
    "gsm8k": 0.35,
    "multiply": 0.35,
}
"""Recipe → former `rollout.memory_fraction`, from the time when everything stayed on the GPUs."""
HEAD = ("recipe", "share", "KV tokens of a worker", "at once", "GiB left", "moving, s", "step, s")


def figures(name: str, *overrides: str) -> dict[str, Any]:
    """Returns the dry run's figures of a recipe."""
    config = compose(ROOT / "configs" / f"{name}.yaml", overrides)
    v = dry_run.values(config, *dry_run.checked(config))
    return {
        "memory_fraction": config.rollout.memory_fraction,
        "keep": config.residency.keep,
        "kv_tokens": v["engines"]["workers"][0]["memory"]["tokens"],
        "sequences_at_once": v["engines"]["usual"],
        "left": v["shared"]["left"],
        "least_left": v["shared"]["margin"],
        "host_memory": max(node["host_memory_total"] for node in v["nodes"]),
        "seconds": {key: value for key, value in v["seconds"].items() if key != "tokens_per_second_per_gpu"},
    }


def measure(name: str) -> dict[str, Any]:
    """Returns the figures of the recipe, and with everything resident: at the published fraction, and at a fraction
    with a fit."""
    now = figures(name)
    published = f"rollout.memory_fraction={now['memory_fraction']}"
    try:
        refused = figures(name, "residency.keep=null", published)["least_left"]
    except UserError as error:
        refused = str(error)
    before = figures(name, "residency.keep=null", f"rollout.memory_fraction={ALONE[name]}")
    return {"before": before, "before_at_the_published_share": refused, "now": now}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the table (before → now) for the page."""

    def cells(name: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
        gib = 2**30
        return [
            f"`{name}`",
            f"{a['memory_fraction']:g} → **{b['memory_fraction']:g}**",
            f"{a['kv_tokens']:,} → {b['kv_tokens']:,}",
            f"{a['sequences_at_once']} → {b['sequences_at_once']}",
            f"{a['least_left'] / gib:.1f} → {b['least_left'] / gib:.1f}",
            f"{b['seconds']['residency']:.1f}",
            f"{a['seconds']['step']:,.0f} → {b['seconds']['step']:,.0f}",
        ]

    rows = [list(HEAD), ["---"] * len(HEAD)]
    rows += [cells(name, each["before"], each["now"]) for name, each in results.items()]
    return [f"| {' | '.join(row)} |".replace(" --- ", "---") for row in rows]


def main() -> int:
    """Writes the results and the table."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # a folder without model and data
        results = {name: measure(name) for name in ALONE}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text("\n".join([f"{before}{MARKS[0]}", *table(results), f"{MARKS[1]}{after}"]))
    print("\n".join(table(results)))
    return int(any(each["now"]["least_left"] < 0 for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
