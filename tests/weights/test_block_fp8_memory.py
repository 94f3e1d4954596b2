"""A block-FP8 file of 30 GB, sparse on disk, is loaded box by box in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_mega.hf_checkpoint.index import read_header
from skyrl_mega.models.registry import architecture
from tests.conftest import ROOT
from tests.support.fp8_files import CONFIG, FP8, values
from tests.weights.fp8_memory import MARKED
from tests.weights.grids import REAL

RANK = 3
"""The rank with the lower half of the marked matrix, which begins inside a block."""


def sparse(folder: Path) -> tuple[torch.Tensor, int]:
    """Writes the directory; returns the values of the marked matrix, float32, and the length of the file."""
    hf: dict[str, Any] = {
        **REAL["235B"],
        "num_hidden_layers": 12,
        "moe_intermediate_size": 1600,
        "vocab_size": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "quantization_config": CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in architecture(hf).tensors(hf).items():
        parts = [(name, shape, "BF16", 2)]
        if name.endswith("_proj.weight"):
            parts = [(f"{name}_scale_inv", tuple(-(-n // 128) for n in shape), "F32", 4), (name, shape, "F8_E4M3", 1)]
        for part, sizes, dtype, itemsize in parts:
            nbytes = prod(sizes) * itemsize
            header[part] = {"dtype": dtype, "shape": sizes, "data_offsets": [end, end + nbytes]}
            end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
    entries = read_header(file)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 120, entries[MARKED].shape, generator=generator, dtype=torch.uint8).view(FP8)
    scales = torch.rand(entries[f"{MARKED}_scale_inv"].shape, generator=generator)
    with file.open("r+b") as opened:
        for name, tensor in ((MARKED, numbers.view(torch.uint8)), (f"{MARKED}_scale_inv", scales)):
            opened.seek(entries[name].offset)
            opened.write(tensor.numpy().tobytes())
    return values(numbers, scales, torch.bfloat16).double(), file.stat().st_size


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_gigabytes_are_loaded_within_two_gib_beside_the_shard(tmp_path: Path) -> None:
    expected, size = sparse(tmp_path)
    assert size > 30e9
    assert os.stat(tmp_path / "model.safetensors").st_blocks * 512 < 100e6, "the file system keeps holes"
    command = [sys.executable, "-m", "tests.weights.fp8_memory", str(tmp_path), str(RANK)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    beyond = (measured["peak"] - measured["shard"]) / 2**30
    print(
        f"{size / 1e9:.1f} GB; shard {measured['shard'] / 2**30:.2f} GiB, {beyond:.2f} GiB beyond, "
        f"{measured['seconds']:.1f} s ({measured['cpu']:.1f} s of a core)"
    )
    assert measured["shard"] > 1.8e9 and beyond < 2
    assert measured["marked"] == [[800, 0, 800, 4096]]
    part = expected[800:]
    assert measured["sums"] == [pytest.approx(float(part.sum()), rel=1e-12)]
    assert measured["nonzero"] == int((part != 0).sum()), "all other tensors are holes"
