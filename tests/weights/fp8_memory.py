"""A process that loads a rank's shard of a large sparse block-FP8 file, and prints bytes, seconds and values as JSON.

python -m tests.weights.fp8_memory DIRECTORY RANK
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.hf_checkpoint.load import load
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.pack import local_view

PARALLEL = ParallelDims(32, tensor=2, expert=16, expert_tensor=2)
MARKED = "model.layers.3.mlp.experts.9.up_proj.weight"
"""The matrix with numbers and scales other than 0; all others are holes of the file."""


def memory(field: str) -> int:
    """Returns a field of this process's status, in bytes; `VmHWM` is the peak of the resident memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def main(folder: Path, rank: int) -> dict[str, Any]:
    """Loads the shard in BF16; returns the measurements and the boxes of the marked matrix."""
    hf = read_config(folder)
    shard = architecture(hf).megatron_shard(hf, PARALLEL, rank, "local")
    params = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shard.params.items()}
    before, start, cpu = memory("VmRSS"), time.monotonic(), time.process_time()
    load(folder, shard, params)
    seconds = time.monotonic() - start
    cpu = time.process_time() - cpu
    peak = memory("VmHWM") - before
    marked = [piece for piece in shard.pieces if piece.tensor == MARKED]
    return {
        "seconds": seconds,
        "cpu": cpu,
        "shard": sum(tensor.nbytes for tensor in params.values()),
        "peak": peak,
        "marked": [[*piece.box.start, *piece.box.shape] for piece in marked],
        "sums": [float(local_view(params[p.param], p.offset, p.box).double().sum()) for p in marked],
        "nonzero": sum(int((tensor != 0).sum()) for tensor in params.values()),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
