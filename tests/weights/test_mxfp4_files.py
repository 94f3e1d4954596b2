"""Experts in MXFP4, and experts with another order of axes on disk: values of any box, equal to transformers' own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from skyrl_mega.hf_checkpoint import row_reader
from skyrl_mega.hf_checkpoint.index import TensorEntry, read_header
from skyrl_mega.hf_checkpoint.tensor_reader import TensorReader
from skyrl_mega.kernels import mxfp4
from skyrl_mega.models.disk_form import DiskForm
from skyrl_mega.parallel.box import Box

SHAPE = (5, 6, 2, 64)
"""Experts, width, gate and up, hidden."""
FORM = DiskForm((0, 3, 1, 2), merged=True, packed=True)


def transformers_values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns transformers' dequantisation, [experts, columns, rows]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return values


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
