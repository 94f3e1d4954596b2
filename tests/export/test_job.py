"""Export jobs for any cut of any tensor into entries, and any size of slab, against the original tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.export import job
from skyrl_mega.export.work import ExportMismatch, ExportWorker
from skyrl_mega.hf_checkpoint.box_files import MASTER, BoxEntry, LocalBox, read_entries, write_boxes
from skyrl_mega.hf_checkpoint.box_header import Header
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.box import Box
from tests.export.test_layouts import same, tensors_of

SIZES = dict(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=8, experts=4, expert_ffn=8)
KINDS = {
    "MoE": BuildConfig(architecture="qwen3_moe", **SIZES),
    "dense": BuildConfig(architecture="qwen2", tied=True, **SIZES),
}


def model(hf: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Returns random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in architecture(hf).tensors(hf).items()}


def saved(folder: Path, parts: dict[str, list[LocalBox]], dtype: str = "float32") -> tuple[Header, list[BoxEntry]]:
    """Writes a checkpoint of these files."""
    sizes = {name: write_boxes(folder / name, some) for name, some in parts.items()}
    tensors: dict[str, list[Box]] = {}
    for part in (part for some in parts.values() for part in some):
        tensors.setdefault(part.tensor, []).append(part.box)
    ends = {t: [[a + n for a, n in zip(b.start, b.shape, strict=True)] for b in bs] for t, bs in tensors.items()}
    shapes = {tensor: tuple(map(max, *boxes)) if len(boxes) > 1 else tuple(boxes[0]) for tensor, boxes in ends.items()}
    header = Header(dtype, 1, {}, {}, shapes, sizes)
    return header, read_entries(folder, header, header.tensors)


def whole(tensors: dict[str, Tensor]) -> list[LocalBox]:
    """Returns every tensor as a single part."""
    return [LocalBox(name, Box((0,) * t.dim(), tuple(t.shape)), MASTER, t) for name, t in tensors.items()]


def cut(tensors: dict[str, Tensor], draw: Any) -> dict[str, list[LocalBox]]:
    """Cuts every tensor into a random grid and deals the boxes to two files."""
    parts: dict[str, list[LocalBox]] = {"a.safetensors": [], "b.safetensors": []}
    for name, tensor in tensors.items():
        edges = [sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=2))}) for n in tensor.shape]
        for at in np.ndindex(*(len(edge) - 1 for edge in edges)):
            start = tuple(edge[i] for edge, i in zip(edges, at, strict=True))
            stop = tuple(edge[i + 1] for edge, i in zip(edges, at, strict=True))
            box = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
            parts[draw(st.sampled_from(sorted(parts)))].append(LocalBox(name, box, MASTER, tensor[box.slices()]))
    return parts


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("files")
    (folder / "out").mkdir()
    hf = hf_config(KINDS[kind])
    expected = model(hf, seed=1)
    header, entries = saved(folder, cut(expected, data.draw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "SLAB_BYTES", data.draw(st.integers(1, 5000), "slab"))
        size = data.draw(st.integers(1, 20_000))
        planned = job.plan_job(hf, header, entries, dtype=None, origin="weights", file_bytes=size)
    for file in planned.files:
        (folder / "out" / file.name).write_bytes(file.header)
    worker = ExportWorker(planned, folder / "out")
    assert sum(worker.write(index)[0] for index in range(len(planned.batches))) == planned.nbytes
    assert same(tensors_of(folder / "out"), expected)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    hf = hf_config(KINDS["MoE"])
    header, entries = saved(tmp_path, {"a": whole(model(hf, seed=1))})

    def planned(header: Header, entries: list[BoxEntry], **changes: Any) -> job.ExportJob:
        return job.plan_job(
            hf, header, entries, **{"dtype": None, "origin": "weights", "file_bytes": 1 << 30, **changes}
        )

    planned(header, entries)
    router = "model.layers.1.mlp.gate.weight"
    rest = {name: shape for name, shape in header.tensors.items() if name != router}
    with pytest.raises(UserError, match=f"{router}: the checkpoint has no such tensor, config.json makes it"):
        planned(replace(header, tensors=rest), entries)
    with pytest.raises(UserError, match=f"{router}: the checkpoint has shape .4, 17., config.json makes it .4, 16."):
        planned(replace(header, tensors={**header.tensors, router: (4, 17)}), entries)
    with pytest.raises(UserError, match=f"{router}: the checkpoint has 0 of its 64 elements"):
        planned(header, [entry for entry in entries if entry.tensor != router])
    with pytest.raises(UserError, match="--from master: the checkpoint has no master weights"):
        planned(header, [replace(entry, kind="weight") for entry in entries], origin="master")


def test_a_tensor_that_was_written_wrong_is_found(tmp_path: Path) -> None:
    """Flips a bit of an element: `verify` reads the element back and finds the difference."""
    (tmp_path / "out").mkdir()
    hf = hf_config(KINDS["dense"])
    header, entries = saved(tmp_path, {"a": whole(model(hf, seed=1))})
    planned = job.plan_job(hf, header, entries, dtype=None, origin="weights", file_bytes=1 << 30)
    out = tmp_path / "out" / planned.files[0].name
    out.write_bytes(planned.files[0].header)
    worker = ExportWorker(planned, tmp_path / "out")
    for index in range(len(planned.batches)):
        worker.write(index)
    assert sum(worker.compare(index) for index in range(len(planned.entries))) * 4 == planned.nbytes
    data = bytearray(out.read_bytes())
    data[planned.files[0].offsets["model.layers.1.self_attn.k_proj.weight"] + 40] ^= 1
    out.write_bytes(data)
    with pytest.raises(ExportMismatch, match=r"layers\.1\.self_attn\.k_proj\.weight differs"):
        [worker.compare(index) for index in range(len(planned.entries))]
    assert json.loads(planned.files[0].header[8:])["__metadata__"] == {"format": "pt"}
