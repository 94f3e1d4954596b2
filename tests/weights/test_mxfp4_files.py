"""Experts in MXFP4, and experts with another order of axes on disk: values of any box, equal to transformers' own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.hf_checkpoint import row_reader
from skyrl_mega.hf_checkpoint.index import TensorEntry, check_files, read_config, read_header
from skyrl_mega.hf_checkpoint.load import load
from skyrl_mega.hf_checkpoint.tensor_reader import TensorReader
from skyrl_mega.kernels import mxfp4
from skyrl_mega.models.disk_form import DiskForm
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.box import Box
from skyrl_mega.weights.exchange.exchange import local_view
from tests.megatron.layouts import layout
from tests.support.mxfp4_files import rewrite, transformers_values

SHAPE = (5, 6, 2, 64)
"""Experts, width, gate and up, hidden."""
FORM = DiskForm((0, 3, 1, 2), merged=True, packed=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_byte_with_every_scale_has_the_value_of_transformers(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    ours = mxfp4.dequantise(blocks, scales, dtype)
    theirs = transformers_values(blocks, scales, dtype).transpose(1, 2).contiguous()
    numbers = ~theirs.isnan()
    assert numbers.float().mean() > 0.99 and torch.equal(ours.isnan(), ~numbers)
    assert torch.equal(ours[numbers].view(torch.uint8), theirs[numbers].view(torch.uint8))  # the sign of 0 too


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TensorEntry, Tensor]]:
    """Writes a tensor in the order on disk, and in MXFP4; returns the entries with the values in the order on disk."""
    generator, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("experts")
    experts, width, two, hidden = SHAPE
    plain = torch.randn(experts, hidden, width * two, generator=generator)
    blocks = torch.randint(0, 256, (experts, width * two, hidden // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    save_file({"plain": plain, "blocks": blocks, "scales": scales}, folder / "model.safetensors")
    entries = read_header(folder / "model.safetensors")
    packed = TensorEntry(**{**vars(entries["blocks"]), "scales": entries["scales"]})
    return {
        "plain": (entries["plain"], plain),
        "MXFP4": (packed, transformers_values(blocks, scales, torch.float32)),
    }


@pytest.mark.parametrize("kind", ["plain", "MXFP4"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_has_the_values_on_disk(
    data: st.DataObject, stored: dict[str, tuple[TensorEntry, Tensor]], kind: str
) -> None:
    """Reads two boxes of a tensor at once, in strips of any number of experts."""
    entry, on_disk = stored[kind]
    expected = on_disk.view(5, 64, 6, 2).permute(0, 2, 3, 1)
    parts = []
    for _ in range(2):
        start = tuple(data.draw(st.integers(0, size - 1)) for size in SHAPE)
        shape = tuple(data.draw(st.integers(1, size - first)) for size, first in zip(SHAPE, start, strict=True))
        parts.append((Box(start, shape), torch.full(shape, torch.nan)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "CHUNK_BYTES", data.draw(st.sampled_from([1, 5000, 1 << 24])))
        row_reader.read_rows(TensorReader(), kind, entry, FORM, SHAPE, parts)
    for box, values in parts:
        assert torch.equal(values, expected[box.slices()])


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(5, 12, 2, 16, dtype=torch.uint8), torch.full((5, 12, 2), 127, dtype=torch.uint8)
    scales[3, 1, 1] = mxfp4.NOT_A_NUMBER
    save_file({"blocks": blocks, "scales": scales}, tmp_path / "model.safetensors")
    entries = read_header(tmp_path / "model.safetensors")
    packed = TensorEntry(**{**vars(entries["blocks"]), "scales": entries["scales"]})
    values = torch.zeros(SHAPE)
    with pytest.raises(UserError, match=r"model\.safetensors: experts: an MXFP4 scale is 255"):
        row_reader.read_rows(TensorReader(), "experts", packed, FORM, SHAPE, [(Box((0,) * 4, SHAPE), values)])


def test_a_tensor_written_in_the_order_on_disk_is_read_back() -> None:
    for form, shape in (
        (FORM, SHAPE),
        (DiskForm((0, 2, 1)), (3, 4, 5)),
        (DiskForm((0, 1, 2), merged=True), (3, 4, 2)),
    ):
        values = torch.randn(shape)
        on_disk = form.to_disk(values)
        assert tuple(on_disk.shape) == form.shape(shape) and on_disk.is_contiguous()
        assert torch.equal(form.from_disk(on_disk, shape), values)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Writes a tiny gpt-oss with experts in MXFP4; returns the directory, and every tensor as transformers reads it."""
    folder = tmp_path_factory.mktemp("models") / "mxfp4"
    build(BuildConfig(architecture="gpt_oss", experts=4, hidden=64, expert_ffn=32), folder)
    return folder, rewrite(folder, folder)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, {}), (2, {"tensor": 2, "expert": 2}), (2, {"pipeline": 2})])
def test_a_policy_loads_the_values_of_transformers(
    checkpoint: tuple[Path, dict[str, Tensor]], ranks: int, sizes: dict[str, int]
) -> None:
    folder, expected = checkpoint
    hf, found = read_config(folder), dict[str, Tensor]()
    arch = architecture(hf)
    forms = arch.describe(hf).disk_forms
    check_files(folder, hf)
    for shard in arch.megatron_layout(hf, layout(ranks, **sizes), "local").shards:
        params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shard.params.items()}
        load(folder, shard, params)
        for piece in shard.pieces:
            whole = found.setdefault(piece.tensor, torch.zeros(arch.tensors(hf)[piece.tensor], dtype=torch.bfloat16))
            whole[piece.box.slices()] = local_view(params[piece.param], piece.offset, piece.box)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        on_disk = forms[name].to_disk(values) if name in forms else values
        assert torch.equal(on_disk.view(torch.int16), expected[name].view(torch.int16)), name


def test_an_engines_worker_loads_the_values_of_transformers(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    folder, expected = checkpoint
    hf = read_config(folder)
    shard = architecture(hf).engine_shard(hf, 2, 1)
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shard.params.items()}
    load(folder, shard, params)
    name = "model.layers.0.mlp.experts"
    w13, w2 = (params[f"{name}.routed_experts.{part}"] for part in ("w13_weight", "w2_weight"))
    assert torch.equal(w13.flatten(1, 2), expected[f"{name}.gate_up_proj"].mT[:, 32:])
    assert torch.equal(w2, expected[f"{name}.down_proj"].mT[:, :, 16:])


def test_missing_scales_are_named(checkpoint: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    for file in checkpoint[0].iterdir():
        shutil.copy(file, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.experts\.down_proj_scales is missing"):
        check_files(tmp_path)


def test_an_expert_at_a_time_is_in_memory(
    checkpoint: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the blocks handed to the dequantisation at once."""
    folder, sizes = checkpoint[0], list[int]()
    dequantise = mxfp4.dequantise

    def counted(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        sizes.append(len(blocks))
        return dequantise(blocks, scales, dtype)

    monkeypatch.setattr(mxfp4, "dequantise", counted)
    monkeypatch.setattr(row_reader, "CHUNK_BYTES", 1)
    hf = read_config(folder)
    shard = architecture(hf).engine_shard(hf, 1, 0)
    load(folder, shard, {name: torch.zeros(shape) for name, shape in shard.params.items()})
    assert sizes == [1] * 16  # two layers, two tensors, four experts
