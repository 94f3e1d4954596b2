"""Proofs with scripted behaviour, and helpers to read the results of `make gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.proof import Bench, Proof
from benchmarks.gpu.results import Results
from benchmarks.gpu.runner import Call

DEVICE = {"name": "a GPU"}


def good(bench: Bench) -> None:
    bench.figure("speed", 30.0, "GB/s", limit=40.0, limit_of="a copy")
    bench.holds("water is wet", True)


def wrong(bench: Bench) -> None:
    bench.figure("error", 0.5, "nats", at_most=0.1)
    bench.figure("share", 0.5, "", at_least=0.4)
    bench.holds("water is dry", False, "water")


def not_a_number(bench: Bench) -> None:
    bench.figure("error", float("nan"), "nats", at_most=0.1)


def raises(bench: Bench) -> None:
    bench.figure("before it", 1.0, "s")
    raise RuntimeError("the root cause")


def dies(bench: Bench) -> None:
    print("last words", flush=True)
    os._exit(7)


def hangs(bench: Bench) -> None:
    """Hangs, together with a child process."""
    other = subprocess.Popen(["sleep", "600"])
    bench.note("other", other.pid)
    bench.figure("before it", 1.0, "s")
    time.sleep(600)


def cuda_only(bench: Bench) -> None:
    bench.left_out("all of it")


def counts(bench: Bench) -> None:
    """Records the number of runs so far."""
    path = Path(os.environ["PROOFS_RUN"])
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    bench.figure("runs", len(path.read_text()), "")


def imports(bench: Bench) -> None:
    """Imports Transformer Engine as megatron-core does: only an ImportError is caught."""
    import other  # type: ignore[import-not-found]

    bench.holds("it was brought", bool(other))
    import torch  # noqa: F401

    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found]
    except ImportError:
        bench.note("Transformer Engine", "absent")
    else:
        bench.note("Transformer Engine", Path(transformer_engine.__file__).parents[1].name)


def proof(name: str, **more: Any) -> Proof:
    values: dict[str, Any] = dict(name=name, about=name, entry=f"{__name__}:{name}", seconds=1.0, limit_s=60.0)
    return Proof(**{**values, **more})


def results(path: Path) -> Results:
    return Results(path.parent, DEVICE, {"python": "3"})


def kept(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(path.read_text())["proofs"]
    return saved


def rehearsed(path: Path) -> dict[str, Any]:
    """Returns the rehearsal's results next to this file."""
    return kept(path.with_name("a-rehearsal-on-the-cpu.json"))


def quiet(budget_s: float = 120.0, **more: Any) -> Call:
    return Call(budget_s, say=lambda _: None, **more)
