"""Measures the time of a checkpoint, and the host memory per rank.

    python -m benchmarks.checkpoint [--folder DIR] [--layers 2] [--ranks 4] [--tensor 2] [--expert 2] [--repeat 3]
        [--output FILE.json]

Runs real ranks over gloo on this machine, with a Qwen3-MoE of a few hundred million parameters in bfloat16. Each round
saves and loads; the time of a save includes fsync, and the files are dropped from the page cache before loading. Memory
is the highest private memory (USS) of a rank during a save or a load, minus the memory before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.host import Memory, forget, uss_mb
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.megatron import layouts
from tests.support.ranks import run_ranks


def measure(
    rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, repeat: int
) -> list[dict[str, Any]]:
    """Measures rounds on a rank: seconds and memory of a save and a load."""
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(), torch.bfloat16)
    rounds = []
    for number in range(repeat):
        folder_of_round = folder / str(number)
        row: dict[str, Any] = {}
        if rank == 0:
            folder_of_round.mkdir()
        calls: list[tuple[str, Callable[[Path], None]]] = [("save", opened.save), ("load", opened.restore)]
        for name, call in calls:
            dist.barrier()
            before = uss_mb(psutil.Process())
            with Memory() as memory:
                start = time.perf_counter()
                call(folder_of_round)
                if name == "save" and rank == 0:
                    for file in folder_of_round.rglob("*"):
                        with file.open("rb") as written:
                            os.fsync(written.fileno())
                dist.barrier()
                row[f"{name}_s"] = time.perf_counter() - start
            row[f"{name}_mb"] = max(0.0, memory.peak - before)
            if name == "save" and rank == 0:
                row["bytes"] = sum(file.stat().st_size for file in folder_of_round.rglob("*") if file.is_file())
                forget(folder_of_round)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder_of_round)
        rounds.append(row)
    return rounds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--expert", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        model, folder = Path(temporary) / "model", Path(temporary) / "checkpoints"
        folder.mkdir()
        build(BuildConfig(layers=args.layers, hidden=1024, experts=32, expert_ffn=768), model, seed=1)
        parallel = layouts.layout(args.ranks, tensor=args.tensor, expert=args.expert)
        answers = run_ranks(args.ranks, measure, model, parallel, folder, args.repeat, timeout=600)
    rounds = [
        {
            "bytes": rows[0]["bytes"],
            **{name: max(row[name] for row in rows) for name in ("save_s", "load_s", "save_mb", "load_mb")},
        }
        for rows in zip(*answers, strict=True)
    ]
    result: dict[str, Any] = {"ranks": args.ranks, "tensor": args.tensor, "expert": args.expert, "layers": args.layers}
    result |= {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    result |= {f"{name}_mb_s": result["bytes"] / 1e6 / result[f"{name}_s"] for name in ("save", "load")}
    result["rounds"] = rounds
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
