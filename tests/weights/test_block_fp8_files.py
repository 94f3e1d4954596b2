"""Hugging Face directories in block FP8: values of any box and any layout, unread tensors, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.hf_checkpoint import tensor_reader
from skyrl_mega.hf_checkpoint.copied import unread_note
from skyrl_mega.hf_checkpoint.index import check_files, check_tensors, read_config, unread_tensors
from skyrl_mega.hf_checkpoint.load import load
from skyrl_mega.hf_checkpoint.tensor_reader import TensorReader
from skyrl_mega.models.quantization import BlockFp8
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.box import Box
from tests.support.fp8_files import CONFIG, FP8, dequantised, extra_layer, quantised, rewrite, values
from tests.weights.grids import LAYOUTS, cut, empty
from tests.weights.test_execute import same

SIZES = dict(layers=4, hidden=192, heads=4, kv_heads=4, head_dim=48, experts=4, expert_ffn=160)
ROWS, COLUMNS = 300, 450


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a tiny Qwen3-MoE with matrices of several blocks, none a multiple of 128."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    build(BuildConfig(architecture="qwen3_moe", **SIZES), folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[torch.dtype, torch.Tensor], torch.Tensor]:
    """Writes a matrix of every E4M3 number but NaN, with scales in two types; returns the file, scales and numbers."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 254, (ROWS, COLUMNS), generator=generator)
    numbers = (codes + (codes >= 127).long()).to(torch.uint8).view(FP8)
    exact = torch.rand(3, 4, generator=generator) * 1e-3
    scales = {torch.float32: exact, torch.bfloat16: exact.to(torch.bfloat16)}
    folder = tmp_path_factory.mktemp("matrix")
    for dtype, stored in scales.items():
        tensors = {"a.weight": numbers, "a.weight_scale_inv": stored, "pad": torch.zeros(3, dtype=torch.uint8)}
        save_file(tensors, folder / f"{str(dtype)[6:]}.safetensors")
    return folder, scales, numbers


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_has_the_values_of_the_formula(
    data: st.DataObject, matrix: tuple[Path, dict[torch.dtype, torch.Tensor], torch.Tensor]
) -> None:
    """Reads boxes that begin and end inside blocks, in strips of any size, into both types."""
    folder, scales, numbers = matrix
    scale_type = data.draw(st.sampled_from(list(scales)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    start = (data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, COLUMNS - 1)))
    shape = (data.draw(st.integers(1, ROWS - start[0])), data.draw(st.integers(1, COLUMNS - start[1])))
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors").symlink_to(folder / f"{str(scale_type)[6:]}.safetensors")
    entry = check_tensors(folder, {"a.weight": (ROWS, COLUMNS)}, BlockFp8())["a.weight"]
    into = torch.full((shape[0] + 2, shape[1] + 3), torch.nan, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_reader, "CHUNK_BYTES", data.draw(st.sampled_from([1, 1000, 40_000, 1 << 24])))
        TensorReader().read("a.weight", entry, [(Box(start, shape), into[1:-1, 2:-1])])
    expected = values(numbers, scales[scale_type], dtype)[Box(start, shape).slices()]
    assert torch.equal(into[1:-1, 2:-1].contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert into[0].isnan().all() and into[-1].isnan().all() and into[:, :2].isnan().all() and into[:, -1].isnan().all()


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    """Compares with transformers' own dequantisation, which takes whole blocks only."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scales = quantised(torch.randn(256, 384, generator=torch.Generator().manual_seed(1)))
    save_file({"a.weight": numbers, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    entry = check_tensors(tmp_path, {"a.weight": (256, 384)}, BlockFp8())["a.weight"]
    for dtype in (torch.bfloat16, torch.float32):
        into = torch.empty(256, 384, dtype=dtype)
        TensorReader().read("a.weight", entry, [(Box((0, 0), (256, 384)), into)])
        assert torch.equal(into, Fp8Dequantize(None)._dequantize_one(numbers, scales, dtype))


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2 ep2 etp2"])
def test_a_rank_loads_its_boxes(layout: str, model: Path, tmp_path: Path) -> None:
    tensors = rewrite(model, tmp_path / "fp8", torch.bfloat16, extra_layer(4, 192))
    check_files(tmp_path / "fp8")
    hf = read_config(tmp_path / "fp8")
    whole = dequantised(tensors, torch.float32)
    for spec in ("local", "te"):
        for shard in architecture(hf).megatron_layout(hf, LAYOUTS[layout], spec).shards:  # type: ignore[arg-type]
            params = empty(shard)
            load(tmp_path / "fp8", shard, params)
            assert same(params, cut(shard, whole))


def test_tensors_of_no_layer_stay_unread_and_are_listed(model: Path, tmp_path: Path) -> None:
    extra = extra_layer(4, 192)
    tensors = rewrite(model, tmp_path / "fp8", extra=extra)
    hf = read_config(tmp_path / "fp8")
    unread = unread_tensors(tmp_path / "fp8", hf)
    assert set(unread) == set(extra)
    assert sum(entry.nbytes for entry in unread.values()) == sum(tensors[name].nbytes for name in extra)
    note = unread_note(tmp_path / "fp8", hf)
    assert note is not None and note.startswith("5 tensors (0.0747 MB)")
    assert "model.layers.4.*, mtp.*;" in note
    assert unread_note(model, read_config(model)) is None
    (tmp_path / "empty").mkdir()
    assert unread_tensors(tmp_path / "empty", hf) == {}, "configuration and tokenizer alone"


def test_a_saved_tied_head_and_a_buffer_are_neither_read_nor_copied(tmp_path: Path) -> None:
    build(BuildConfig(architecture="llama", tied=True), tmp_path / "m", seed=0)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, file)
    check_files(tmp_path / "m")
    assert unread_tensors(tmp_path / "m", read_config(tmp_path / "m")) == {}


def spoil(folder: Path, how: str) -> None:
    hf = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.q_proj.weight"
    scales = f"{name}_scale_inv"
    file = folder / index["weight_map"][scales]
    match how:
        case "no scales":
            del index["weight_map"][scales]
        case "scales of another shape":
            save_file({**load_file(file), scales: torch.ones(2, 3)}, file)
        case "scales of another type":
            save_file({**load_file(file), scales: torch.ones(2, 2).to(torch.float8_e5m2)}, file)
        case "config.json without quantisation":
            del hf["quantization_config"]
        case "unknown tensor of a layer":
            index["weight_map"]["model.layers.3.self_attn.q_proj.bias"] = "a.safetensors"
        case "int4":
            hf["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "how, words",
    [
        ("no scales", ["index.json", "q_proj.weight_scale_inv is missing"]),
        ("scales of another shape", ["q_proj.weight_scale_inv has shape [2, 3], config.json makes it [2, 2]"]),
        ("scales of another type", ["q_proj.weight_scale_inv has type F8_E5M2"]),
        ("config.json without quantisation", ["has type F8_E4M3", "config.json has no quantization_config"]),
        ("unknown tensor of a layer", ["model.layers.3.self_attn.q_proj.bias is unknown to a qwen3_moe"]),
        ("int4", ["config.json: quantization_config.quant_method is compressed-tensors", "block FP8"]),
    ],
)
def test_a_wrong_directory_is_refused_in_one_line(how: str, words: list[str], model: Path, tmp_path: Path) -> None:
    rewrite(model, tmp_path / "fp8")
    spoil(tmp_path / "fp8", how)
    with pytest.raises(UserError) as error:
        check_files(tmp_path / "fp8")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"quant_method": "mxfp4"}, "quant_method is mxfp4: only block FP8"),
        ({"quant_method": None}, "quant_method is null: only block FP8"),
        ({"weight_block_size": None}, "weight_block_size is null: FP8 is read with a scale for every block of 128"),
        ({"weight_block_size": [1, 128]}, "weight_block_size is [1, 128]: FP8 is read"),
        ({"activation_scheme": "static"}, "activation_scheme is static: the files hold scales of activations"),
        ({"fmt": "e5m2"}, "fmt is e5m2: FP8 is read as e4m3"),
        ({"scale_fmt": "e8"}, "scale_fmt is e8: scales are read as numbers"),
    ],
)
def test_every_other_quantisation_is_refused_with_the_reason(changes: dict[str, Any], words: str, model: Path) -> None:
    hf = {**read_config(model), "quantization_config": {**CONFIG, **changes}}
    with pytest.raises(UserError) as error:
        architecture(hf).tensors(hf)
    assert words in str(error.value) and "give a checkpoint in BF16" in str(error.value)


def test_the_files_of_the_hub_are_accepted(model: Path) -> None:
    """Reads the `quantization_config` of DeepSeek-V3, V3.1, MiniMax-M2 and Qwen3."""
    skipped = {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    for changes in ({}, {"scale_fmt": "ue8m0"}, {"fmt": "float8_e4m3fn", **skipped}, skipped):
        hf = {**read_config(model), "quantization_config": {**CONFIG, **changes}}
        assert architecture(hf).tensors(hf)
