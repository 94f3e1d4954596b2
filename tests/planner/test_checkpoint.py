"""Bytes written to a checkpoint by each rank: every element once, evenly, and equal to real ranks."""

from __future__ import annotations

import time
import tracemalloc
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, MoeConfig, OptimizerConfig
from skyrl_mega.hf_checkpoint import box_files
from skyrl_mega.hf_checkpoint.box_files import LocalBox, file_name, read_entries
from skyrl_mega.hf_checkpoint.box_header import Header, SavedFile
from skyrl_mega.models import dist_checkpoint, huggingface, megatron
from skyrl_mega.models.blocks.experts import MEGATRON_ROUTER, MEGATRON_ROUTER_BIAS
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import Spec
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.flat import FlatPiece, Run, flat_pieces
from skyrl_mega.planner.buffers import MASTER, MOMENTS, buffer
from skyrl_mega.planner.checkpoint import INDEX, STAGING, checkpoint_bytes
from skyrl_mega.planner.parameters import EXPERTS, Parameters
from tests.megatron import layouts
from tests.planner.test_buffers import MODELS
from tests.support.ranks import run_ranks

STATE = MASTER + MOMENTS["float32"]

CASES: list[tuple[str, int, dict[str, int], bool]] = [
    ("moe", 1, {}, False),
    ("moe", 3, {}, True),
    ("moe", 4, {"tensor": 2}, True),
    ("moe", 8, {"tensor": 2, "expert": 2, "pipeline": 2}, False),
    ("moe", 8, {"tensor": 2, "expert": 2, "expert_tensor": 2, "context": 2}, True),
    ("moe", 8, {"expert": 4, "pipeline": 2, "virtual_pipeline": 2}, False),
    ("tied moe", 8, {"pipeline": 2, "expert": 2, "first_stage_layers": 1, "last_stage_layers": 3}, False),
    ("shared", 8, {"tensor": 2, "expert": 2, "pipeline": 2}, False),
    ("shared", 4, {"tensor": 2, "expert": 2}, True),
    ("latent", 8, {"tensor": 2, "expert": 2, "pipeline": 2}, False),
    ("dense", 4, {"pipeline": 4}, False),
    ("tied dense with bias", 8, {"tensor": 2, "pipeline": 2}, False),
    ("tied dense with bias", 6, {"pipeline": 2, "virtual_pipeline": 2}, False),
]


def owned(d: Decoder, parallel: ParallelDims, rank: int, shard: Shard, freeze: bool) -> tuple[dict[str, Run], ...]:
    """Returns the runs trained on a rank by megatron-core's distributed optimizer, and the frozen parameters."""
    at, trained, frozen = parallel.coordinates(rank), {}, {}
    for number in range(parallel.virtual_pipeline):
        names = np.array([name for name in shard.params if name.startswith(f"{number}.")])
        fixed = np.array([name.endswith("expert_bias") for name in names])
        router = np.array([freeze and name.endswith((MEGATRON_ROUTER, MEGATRON_ROUTER_BIAS)) for name in names]) | fixed
        experts = np.array([parallel.expert > 1 and EXPERTS in name for name in names])
        vocabulary = np.array([name.endswith(("word_embeddings.weight", "output_layer.weight")) for name in names])
        numel = np.array([prod(shard.params[name]) for name in names])
        shared = vocabulary & (d.tied and parallel.pipeline > 1)
        chunk = Parameters(numel, experts, router, fixed, shared, np.ones_like(numel))
        frozen |= {name: (0, prod(shard.params[name])) for name in names[router].tolist()}
        dense = (~experts, parallel.data * parallel.context, at.dp * parallel.context + at.cp)
        for chosen, ranks, index in (dense, (experts, parallel.expert_data, at.edp)):
            runs = buffer(chunk.select(chosen & ~router), ranks).runs(index).tolist()
            order = names[chosen & ~router][::-1].tolist()
            trained |= {name: (first, last) for name, (first, last) in zip(order, runs, strict=True)}
    return trained, frozen


def plan(d: Decoder, parallel: ParallelDims, rank: int, spec: Spec, freeze: bool) -> tuple[list[FlatPiece], set[str]]:
    """Returns the boxes written by a rank, and the frozen parameters."""
    shard = megatron.shard(d, parallel, rank, spec, huggingface.tensors(d))
    trained, frozen = owned(d, parallel, rank, shard, freeze)
    return flat_pieces(shard, dist_checkpoint.runs_to_write(d, parallel, rank, shard, trained, frozen)), set(frozen)


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize(("model", "ranks", "sizes", "freeze"), CASES)
def test_every_element_is_written_once(model: str, ranks: int, sizes: dict[str, int], freeze: bool, spec: Spec) -> None:
    """Counts writes for every layer spec: its parameter names vary, and each spec reads the other's checkpoint."""
    d = architecture(hf_config(MODELS[model])).describe(hf_config(MODELS[model]))
    parallel = layouts.layout(ranks, **sizes)
    count = {name: np.zeros(shape, int) for name, shape in huggingface.tensors(d).items()}
    for rank in range(ranks):
        for piece in plan(d, parallel, rank, spec, freeze)[0]:
            count[piece.tensor][piece.box.slices()] += 1
    for name, times in count.items():
        assert (times == 1).all(), name


def large(name: str, ranks: int, **sizes: int) -> tuple[Decoder, ParallelDims]:
    hf = known(name)
    return architecture(hf).describe(hf), layouts.layout(ranks, **sizes)


def published() -> Iterator[Any]:
    for nodes, tensor in ((4, 2), (2, 4)):
        for spec in ("local", "te"):
            yield pytest.param(8 * nodes, tensor, spec, id=f"{nodes}x8 TP{tensor} EP8 {spec}")


@pytest.mark.parametrize(("ranks", "tensor", "spec"), published())
@pytest.mark.parametrize("freeze", [False, True])
def test_thirty_billion_parameters_are_written_evenly(ranks: int, tensor: int, spec: Spec, freeze: bool) -> None:
    """Checks for an even share within 5 %, each rank writing from its own memory without traffic between ranks."""
    d, parallel = large("Qwen/Qwen3-30B-A3B", ranks, tensor=tensor, expert=8)
    shapes = huggingface.tensors(d)
    elements = dict.fromkeys(shapes, 0)
    size = []
    for rank in range(ranks):
        pieces, frozen = plan(d, parallel, rank, spec, freeze)
        local_shard = megatron.shard(d, parallel, rank, spec, shapes)
        held: dict[str, list[Any]] = {}
        for piece in local_shard.pieces:
            held.setdefault(piece.tensor, []).append(piece.box)
        for piece in pieces:
            assert any(piece.box.intersect(box) == piece.box for box in held[piece.tensor])
            elements[piece.tensor] += piece.box.numel
        size.append(sum(piece.box.numel * (2 if piece.param in frozen else STATE) for piece in pieces))
        assert checkpoint_bytes(d, parallel, rank, 2, freeze) == pytest.approx(
            size[-1], rel=1e-6 if spec == "local" else 1e-3
        )
    assert elements == {name: prod(shape) for name, shape in shapes.items()}
    even = sum(size) / ranks
    print(
        f"{ranks} ranks: {sum(size) / 1e9:.1f} GB, {min(size) / even - 1:+.3%} to {max(size) / even - 1:+.3%} of even"
    )
    assert max(abs(n / even - 1) for n in size) < 0.05


def test_the_index_of_thirty_billion_parameters_is_small_and_read_at_once(tmp_path: Path) -> None:
    """Reads files with the headers of 32 ranks and holes in place of the data."""
    d, parallel = large("Qwen/Qwen3-30B-A3B", 32, tensor=2, expert=8)
    shapes, files = huggingface.tensors(d), {}
    for rank in range(32):
        nothing = torch.empty((), device="meta")
        parts = [
            LocalBox(piece.tensor, piece.box, kind, nothing.expand(piece.box.shape))
            for piece in plan(d, parallel, rank, "te", False)[0]
            for kind in (box_files.MASTER, box_files.EXP_AVG, box_files.EXP_AVG_SQ)
        ]
        ends = np.cumsum([part.box.numel * 4 for part in parts]).tolist()
        header = box_files._header(parts, [0, *ends[:-1]], ends, [0] * len(parts))
        with (tmp_path / file_name(rank)).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + ends[-1])
        files[file_name(rank)] = SavedFile(len(header) + ends[-1], zlib.crc32(header))
    header_json = Header("bfloat16", 1, {}, {}, shapes, files)
    wanted = {piece.tensor for piece in megatron.shard(d, parallel, 0, "te", shapes).pieces}
    start = time.perf_counter()
    entries = read_entries(tmp_path, header_json, wanted)
    seconds = time.perf_counter() - start
    tracemalloc.start()
    again = read_entries(tmp_path, header_json, wanted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{len(entries):,} entries in {seconds:.2f} s, {peak / 2**20:.0f} MiB")
    assert again == entries
    assert sum(e.box.numel for e in entries) == 3 * sum(prod(shapes[name]) for name in wanted)
    assert peak < INDEX / 2 and INDEX + STAGING <= 2 * 2**30
    assert box_files.THREADS * box_files.CHUNK_BYTES == STAGING


def save(
    rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, dtype: torch.dtype, settings: Any
) -> Any:
    freeze, optimizer = settings
    policy = layouts.policy_config(moe=MoeConfig(freeze_router=freeze), optimizer=optimizer)
    layouts.open_rank(rank, address, path, parallel, policy, dtype).save(folder)


@pytest.mark.parametrize(
    ("ranks", "sizes", "dtype", "freeze", "moments"),
    [
        (4, {"tensor": 2, "expert": 2}, torch.bfloat16, True, "float32"),
        (3, {}, torch.float32, False, "float32"),
        (2, {}, torch.bfloat16, False, "bfloat16"),
    ],
    ids=["TP2 EP2 bfloat16 frozen router", "DP3 float32", "DP2 bfloat16 moments"],
)
def test_real_ranks_write_as_much_as_they_are_said_to(
    ranks: int, sizes: dict[str, int], dtype: torch.dtype, freeze: bool, moments: str, tmp_path: Path
) -> None:
    model = BuildConfig(layers=2, hidden=256, expert_ffn=256)
    build(model, tmp_path / "model")
    folder, hf = tmp_path / "checkpoint", hf_config(model)
    folder.mkdir()
    parallel = layouts.layout(ranks, **sizes)
    optimizer = OptimizerConfig(moments=moments, beta2=0.95)
    run_ranks(ranks, save, tmp_path / "model", parallel, folder, dtype, (freeze, optimizer))
    d = architecture(hf).describe(hf)
    for rank in range(ranks):
        file = folder / file_name(rank)
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        planned = checkpoint_bytes(d, parallel, rank, dtype.itemsize, freeze, moments=MOMENTS[moments])
        assert file.stat().st_size - header == pytest.approx(planned, abs=STATE * 100)
