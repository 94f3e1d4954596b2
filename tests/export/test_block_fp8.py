"""Exports of models from block-FP8 directories: in BF16, and in the source's FP8."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.cli.export import main
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.export import job
from skyrl_mega.export.export import ExportResult, export
from skyrl_mega.export.requantise import requantise
from skyrl_mega.export.source import CheckpointSource
from skyrl_mega.export.work import ExportMismatch, ExportWorker
from skyrl_mega.hf_checkpoint.box_files import MASTER, WEIGHT, LocalBox, write_boxes
from skyrl_mega.hf_checkpoint.box_header import Header, write_header
from skyrl_mega.hf_checkpoint.index import check_files, read_config
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.box import Box
from tests.export.test_layouts import tensors_of
from tests.support.fp8_files import (
    CORRECTION_BIAS,
    FP8,
    dequantised,
    extra_layer,
    prediction_layer,
    quantised,
    rewrite,
    same_bits,
)

SIZES = dict(layers=2, hidden=192, heads=4, kv_heads=2, head_dim=32, experts=4, expert_ffn=160)
EXTRA = extra_layer(2, 192)
OF_NO_LAYER = ("model.layers.2.", "mtp.")
"""Beginnings of the names of tensors of no layer."""
CHANGED = "model.layers.1.mlp.experts.2.down_proj.weight"
FROZEN = ("model.layers.1.mlp.gate.weight", f"model.layers.1.mlp.gate.{CORRECTION_BIAS}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tiny Qwen3-MoE in block FP8, with tensors of no layer."""
    folder = tmp_path_factory.mktemp("models")
    build(BuildConfig(architecture="qwen3_moe", **SIZES), folder / "plain", seed=3)
    rewrite(folder / "plain", folder / "fp8", extra=EXTRA)
    return folder / "fp8"


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a tiny DeepSeek-V3 in block FP8, with a layer for multi-token prediction and an unrounded correction
    bias."""
    folder = tmp_path_factory.mktemp("deepseek")
    build(BuildConfig(architecture="deepseek_v3", **SIZES), folder / "plain", seed=3)
    file = folder / "plain" / "model.safetensors"
    save_file({**load_file(file), FROZEN[1]: 1 + torch.arange(1.0, 5.0) / 512}, file)
    rewrite(folder / "plain", folder / "fp8", extra=prediction_layer(folder / "plain"))
    return folder / "fp8"


@pytest.fixture(params=["source", "deepseek"])
def either(request: pytest.FixtureRequest) -> Path:
    """Returns each of the two directories in block FP8."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


def checkpoint(folder: Path, tensors: dict[str, Tensor], seed: int = 0) -> Path:
    """Writes a BF16 model's checkpoint with masters, cut into boxes of two files; a router and its correction bias are
    frozen."""
    rng = np.random.default_rng(seed)
    parts: dict[str, list[LocalBox]] = {"rank_00000.safetensors": [], "rank_00001.safetensors": []}
    for name, tensor in tensors.items():
        edges = [sorted({0, n, int(rng.integers(1, n + 1))}) for n in tensor.shape]
        for at in np.ndindex(*(len(edge) - 1 for edge in edges)):
            start = tuple(edge[i] for edge, i in zip(edges, at, strict=True))
            stop = tuple(edge[i + 1] for edge, i in zip(edges, at, strict=True))
            box = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
            kind, dtype = (WEIGHT, tensor.dtype) if name in FROZEN else (MASTER, torch.float32)
            cut = tensor[box.slices()].to(dtype).contiguous()
            parts[sorted(parts)[int(rng.integers(2))]].append(LocalBox(name, box, kind, cut))
    folder.mkdir(parents=True)
    files = {name: write_boxes(folder / name, boxes) for name, boxes in parts.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_header(folder, Header("bfloat16", 1, {}, {}, shapes, files))
    return folder


def exported(folder: Path, source: Path, output: Path, **changes: Any) -> ExportResult:
    return export(CheckpointSource(folder, source, read_config(source)), output, verify=True, **changes)


def loaded(source: Path) -> dict[str, Tensor]:
    """Returns the weights of a run before the first step, in BF16."""
    model = {name: tensor for name, tensor in tensors_of(source).items() if not name.startswith(OF_NO_LAYER)}
    return dequantised(model, torch.bfloat16)


def extra_of(source: Path) -> dict[str, Tensor]:
    """Returns the tensors of no layer of the model."""
    return {name: tensor for name, tensor in tensors_of(source).items() if name.startswith(OF_NO_LAYER)}


@pytest.mark.parametrize("origin", ["weights", "master"])
def test_unchanged_weights_are_the_files_that_were_loaded(
    origin: job.Origin, either: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports in FP8 with slabs of a row of blocks: numbers, scales and copied tensors are the source's, bit by bit."""
    monkeypatch.setattr(job, "SLAB_BYTES", 100_000)
    folder = checkpoint(tmp_path / "policy", loaded(either))
    done = exported(folder, either, tmp_path / "out", fp8=True, origin=origin, file_bytes=200_000)
    assert done.verified and done.dtype == "block-fp8" and done.files > 3
    extra = extra_of(either)
    assert done.copied == len(extra) and done.copied_bytes == sum(t.nbytes for t in extra.values())
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(either))
    assert done.nbytes == sum(tensor.nbytes for tensor in tensors_of(either).values())
    check_files(tmp_path / "out")
    hf = read_config(tmp_path / "out")
    assert hf["quantization_config"] == read_config(either)["quantization_config"]
    assert hf["torch_dtype"] == "bfloat16"


def test_in_bf16_there_is_no_quantisation_left(either: Path, tmp_path: Path) -> None:
    """Exports in BF16: dequantised weights, copied tensors, and a config.json without quantization_config."""
    folder = checkpoint(tmp_path / "policy", loaded(either))
    exported(folder, either, tmp_path / "out")
    assert same_bits(tensors_of(tmp_path / "out"), loaded(either) | extra_of(either))
    hf = read_config(tmp_path / "out")
    assert "quantization_config" not in hf and hf["torch_dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path / "out").values())
    assert set(index["weight_map"]) == set(tensors_of(tmp_path / "out"))
    check_files(tmp_path / "out")


def test_only_changed_blocks_get_new_numbers_and_scales(source: Path, tmp_path: Path) -> None:
    """Changes one element in one block of a matrix of 2 × 2 blocks."""
    weights, before = loaded(source), tensors_of(source)
    weights[CHANGED][130, 7] = 3.0
    exported(checkpoint(tmp_path / "policy", weights), source, tmp_path / "out", fp8=True)
    after = tensors_of(tmp_path / "out")
    scales, old = after.pop(f"{CHANGED}_scale_inv"), before.pop(f"{CHANGED}_scale_inv")
    numbers, old_numbers = after.pop(CHANGED), before.pop(CHANGED)
    assert same_bits(after, before)
    assert scales[1, 0] == torch.tensor(3.0) / 448 and torch.equal(
        scales[[0, 0, 1], [0, 1, 1]], old[[0, 0, 1], [0, 1, 1]]
    )
    block = torch.zeros(numbers.shape, dtype=torch.bool)
    block[128:, :128] = True
    assert torch.equal(numbers.view(torch.uint8)[~block], old_numbers.view(torch.uint8)[~block])
    expected = (weights[CHANGED].float() * (1 / scales[1, 0])).to(FP8)
    assert torch.equal(numbers.view(torch.uint8)[block], expected.view(torch.uint8)[block])


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_powers_of_two_stay_powers_of_two(scale_type: torch.dtype) -> None:
    """Quantises for a source with `scale_fmt: ue8m0`: the smallest power of two that keeps all numbers in range."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 300, generator=generator) * torch.tensor([1.0, 7.0, 448 / 64]).repeat_interleave(100)
    matrix[0, 299] = 448 / 64 * 4
    numbers, scales = quantised(torch.ones(200, 300), scale_type)
    _, new = requantise(matrix, numbers, scales, torch.bfloat16, powers_of_two=True)
    assert new.dtype == scale_type
    for i, j in np.ndindex(2, 3):
        largest = float(matrix[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max())
        assert float(new[i, j]) == 2 ** np.ceil(np.log2(largest / 448))


def test_another_model_directory_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = source.parent / "plain"
    folder = checkpoint(tmp_path / "policy", loaded(source))
    arguments = [folder, "--output", tmp_path / "out", "--model", plain, "--dtype", "block-fp8", "--workers", 1]
    assert main(list(map(str, arguments))) == 2
    assert f"--dtype block-fp8: the model {plain} is not in block FP8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_copied(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "policy", loaded(source))
    arguments = [folder, "--output", tmp_path / "out", "--model", source, "--dtype", "block-fp8", "--workers", 1]
    assert main(list(map(str, arguments))) == 0
    assert f"5 tensors (74.7 kB) of no layer are copied from {source}" in capsys.readouterr().out


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("what", ["numbers", "scales", "copied"])
def test_a_byte_that_was_written_wrong_is_found(
    what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flips a bit of a number, of a scale, and of a copied tensor; `--verify` finds each."""
    folder = checkpoint(tmp_path / "policy", loaded(source))
    flips: dict[str, Callable[[ExportWorker], tuple[Path, int]]] = {
        "numbers": lambda worker: (worker.folder / worker._places[CHANGED][0], worker._places[CHANGED][1] + 40),
        "scales": lambda worker: (
            worker.folder / worker._places[f"{CHANGED}_scale_inv"][0],
            worker._places[f"{CHANGED}_scale_inv"][1],
        ),
        "copied": lambda worker: (worker.folder / next(iter(worker.job.copied)), -1),
    }
    compare = ExportWorker.compare

    def spoilt(worker: ExportWorker, index: int) -> int:
        if index == 0:
            flipped(*flips[what](worker))
        return compare(worker, index)

    monkeypatch.setattr(ExportWorker, "compare", spoilt)
    with pytest.raises(ExportMismatch, match="differs from"):
        exported(folder, source, tmp_path / "out", fp8=True)
    assert not (tmp_path / "out").exists()


def test_a_copied_file_that_is_cut_off_is_no_mistake_of_the_user(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "policy", loaded(source))
    compare = ExportWorker.compare_copy

    def spoilt(worker: ExportWorker, index: int) -> int:
        os.truncate(worker.folder / next(iter(worker.job.copied)), 4)
        return compare(worker, index)

    monkeypatch.setattr(ExportWorker, "compare_copy", spoilt)
    with pytest.raises(ExportMismatch, match="export again"):
        exported(folder, source, tmp_path / "out", fp8=True)
    assert not (tmp_path / "out").exists()


def test_a_source_without_weights_has_nothing_to_copy(source: Path, tmp_path: Path) -> None:
    """Exports with a model directory of configuration and tokenizer alone."""
    shutil.copytree(source, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors*"))
    done = exported(checkpoint(tmp_path / "policy", loaded(source)), tmp_path / "m", tmp_path / "out")
    assert done.copied == 0 and same_bits(tensors_of(tmp_path / "out"), loaded(source))
