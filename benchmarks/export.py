"""Measures the speed of an export relative to copying, and the memory of a worker.

    python -m benchmarks.export [--folder DIR] [--layers 4] [--workers 1,2] [--repeat 3] [--output FILE.json]

Writes a checkpoint in the shape of a Qwen3-MoE as saved by eight ranks (TP2, EP4): bfloat16 weights without an
optimizer, 3.8 GB with four layers. Each round copies the files, exports, and exports twice more with --verify, the
second time to measure the workers' memory. Everything is read from the disk (the files are dropped from the page cache
before) and written to the disk (fsync). A copy and an export of the same round follow each other closely, so the share
is computed per round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.host import Memory, forget
from skyrl_mega.export.export import export
from skyrl_mega.export.source import CheckpointSource
from skyrl_mega.hf_checkpoint.box_files import WEIGHT, LocalBox, file_name, write_boxes
from skyrl_mega.hf_checkpoint.box_header import Header, write_header
from skyrl_mega.models import dist_checkpoint, megatron
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.flat import flat_pieces

RANKS, TENSOR, EXPERT = 8, 2, 4
BLOCK = 16 << 20
FILE_BYTES = 512 << 20
"""Bytes per file: several files are written, as for a large model with 5 GiB each."""


def config(layers: int) -> dict[str, Any]:
    """Returns Qwen3-30B-A3B's config.json with fewer layers and half of the experts."""
    return {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
    }  # fmt: skip


def write_checkpoint(folder: Path, hf: dict[str, Any]) -> int:
    """Writes random weights; returns the bytes written."""
    folder.mkdir()
    description, parallel = architecture(hf).describe(hf), ParallelDims(RANKS, tensor=TENSOR, expert=EXPERT)
    random = torch.randn(151936 * 1024, dtype=torch.bfloat16)
    files = {}
    for rank in range(RANKS):
        shard = megatron.shard(description, parallel, rank, "te")
        everything = {param: (0, prod(shape)) for param, shape in shard.params.items()}
        parts = []
        for piece in flat_pieces(
            shard, dist_checkpoint.runs_to_write(description, parallel, rank, shard, {}, everything)
        ):
            shift = int(torch.randint(len(random) - piece.box.numel + 1, ()))
            values = random[shift : shift + piece.box.numel].view(piece.box.shape)
            parts.append(LocalBox(piece.tensor, piece.box, WEIGHT, values))
        files[file_name(rank)] = write_boxes(folder / file_name(rank), parts)
    write_header(folder, Header("bfloat16", 0, {}, {}, architecture(hf).tensors(hf), files))
    return sum(written.nbytes for written in files.values())


def copy(source: Path, target: Path, workers: int) -> float:
    """Returns the seconds to copy the files to the disk with plain reads and writes, `workers` at once."""
    target.mkdir()

    def one(file: Path) -> None:
        with file.open("rb", buffering=0) as reading, (target / file.name).open("wb", buffering=0) as writing:
            while block := reading.read(BLOCK):
                writing.write(block)
            os.fsync(writing.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, source.glob("*.safetensors")))
    return time.perf_counter() - start


def measure(source: CheckpointSource, folder: Path, workers: int) -> dict[str, float]:
    """Measures a round."""
    row: dict[str, float] = {}
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    forget(source.folder)
    row["copy_mb_s"] = size / 1e6 / copy(source.folder, folder / "copy", workers)
    shutil.rmtree(folder / "copy")
    for name, verify in (("export", False), ("verified", True)):
        forget(source.folder)
        start = time.perf_counter()
        done = export(source, folder / "out", workers=workers, verify=verify, file_bytes=FILE_BYTES)
        row[f"{name}_mb_s"] = done.nbytes / 1e6 / (time.perf_counter() - start)
        shutil.rmtree(folder / "out")
    this_process = psutil.Process()
    with Memory(
        partial(this_process.children, recursive=True) if workers > 1 else lambda: [this_process]
    ) as memory:  # separate, because measuring a process's memory stops the process
        export(source, folder / "out", workers=workers, verify=True, file_bytes=FILE_BYTES)
    row["worker_mb"] = memory.peak
    shutil.rmtree(folder / "out")
    row["share"] = row["export_mb_s"] / row["copy_mb_s"]
    return row


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where there is room for three times the checkpoint")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--workers", default="1,2", help="numbers of workers, with commas (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, hf = Path(temporary), config(args.layers)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(hf))
        size = write_checkpoint(folder / "checkpoint", hf)
        print(f"checkpoint: {size / 1e9:.2f} GB in {TENSOR * EXPERT} files", flush=True)
        source = CheckpointSource(folder / "checkpoint", folder / "model", hf)
        results = []
        columns = ("workers", "copy MB/s", "export MB/s", "share", "with --verify", "worker MB")
        print("".join(c.rjust(15) for c in columns))
        for workers in (int(n) for n in args.workers.split(",")):
            rows = [measure(source, folder, workers) for _ in range(args.repeat)]
            middle = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
            results.append({"workers": workers, **middle, "rounds": rows})
            print(
                f"{workers:15d}{middle['copy_mb_s']:15.0f}{middle['export_mb_s']:15.0f}{middle['share']:15.2f}"
                f"{middle['verified_mb_s']:15.0f}{max(r['worker_mb'] for r in rows):15.0f}",
                flush=True,
            )
    if args.output:
        about = {"bytes": size, "files": TENSOR * EXPERT, "layers": args.layers}
        args.output.write_text(json.dumps({**about, "medians": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
