"""Both forms of Qwen3.5's files: a layer's experts in two tensors, and three tensors for each expert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.engines.vllm.transfer import ShardTransferEngine
from skyrl_mega.hf_checkpoint.copied import copies
from skyrl_mega.hf_checkpoint.index import check_files, read_config
from skyrl_mega.hf_checkpoint.load import load
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Shard
from tests.export.test_block_fp8 import checkpoint, exported
from tests.export.test_layouts import tensors_of
from tests.families.models import COMMON, DELTA
from tests.support.fp8_files import CONFIG, dequantised, rewrite, same_bits
from tests.weights.grids import LAYOUTS, empty, global_tensors

HF: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": COMMON | DELTA,
}
COUNT, WIDTH, HIDDEN = 8, 64, 128
UNREAD = {
    "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.ones(WIDTH, HIDDEN).bfloat16(),
    "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 3, 4).bfloat16(),
    "model.visual.blocks.0.norm1.weight": torch.ones(16).bfloat16(),
}
"""Tensors of other parts, with names like those of experts in both forms."""


def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a model with three for each expert, named as transformers names them."""
    other: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            other[name] = tensor
            continue
        for expert, values in enumerate(tensor):
            parts = {"down_proj": values}
            if kind == "gate_up_proj":
                parts = {"gate_proj": values[:WIDTH], "up_proj": values[WIDTH:]}
            other |= {f"{layer}.experts.{expert}.{part}.weight": rows.clone() for part, rows in parts.items()}
    return other


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    save_file(tensors | UNREAD, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns directories with the same numbers in both forms, and in block FP8."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    random = global_tensors(architecture(HF).disk_tensors(HF))
    stacked = {name: tensor.bfloat16() for name, tensor in random.items()}
    paths = {"stacked": write(folder / "stacked", stacked), "separate": write(folder / "separate", separated(stacked))}
    rewrite(paths["separate"], folder / "fp8")
    return paths | {"fp8": folder / "fp8"}


def shards(hf: dict[str, Any]) -> Iterator[Shard]:
    """Yields the shards of policy ranks in several layouts and of engine workers."""
    kind = architecture(hf)
    for layout in ("one", "tp2", "tp2 ep2"):
        for spec in ("local", "te"):
            yield from kind.megatron_layout(hf, LAYOUTS[layout], spec).shards
    for experts in (False, True):
        yield from kind.engine_layout(hf, 2, 1, experts).shards


def loaded(folder: Path) -> list[dict[str, Tensor]]:
    """Returns the local tensors of all shards, loaded from a directory, without their shapes."""
    params = [(shard, empty(shard)) for shard in shards(read_config(folder))]
    for shard, local in params:
        load(folder, shard, local)
    return [{name: tensor.flatten() for name, tensor in local.items()} for _, local in params]


def test_ranks_and_workers_load_the_same_numbers_from_both_forms(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        entries = check_files(folder)
        assert len(entries) == (36 if folder == folders["stacked"] else 80)
        assert {name for file in copies(folder, 1 << 30) for name in file if "_scale_inv" not in name} == {*UNREAD}
    stacked, separate = loaded(folders["stacked"]), loaded(folders["separate"])
    assert all(same_bits(a, b) for a, b in zip(stacked, separate, strict=True))
    assert not any(tensor.isnan().any() for local in stacked for name, tensor in local.items() if "experts" in name)


def test_experts_in_block_fp8_are_read_for_each_expert(folders: dict[str, Path], tmp_path: Path) -> None:
    """Compares with a directory of the dequantised numbers."""
    tensors = {name: tensor for name, tensor in tensors_of(folders["fp8"]).items() if name not in UNREAD}
    plain = dequantised(tensors, torch.float32)
    expected = loaded(write(tmp_path / "plain", plain))
    assert all(same_bits(a, b) for a, b in zip(loaded(folders["fp8"]), expected, strict=True))


@pytest.mark.parametrize("form", ["separate", "fp8", "stacked"])
def test_an_export_of_a_checkpoint_has_the_form_of_the_source(
    form: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Compares every tensor bit by bit, in block FP8 too; decay rates are in float32, with equal values."""
    source = tensors_of(folders[form])
    weights = {name: tensor for name, tensor in source.items() if not name.startswith(("mtp.", "model.visual."))}
    policy = checkpoint(tmp_path / "policy", dequantised(weights, torch.bfloat16))
    exported(policy, folders[form], tmp_path / "out", fp8=form == "fp8")
    written, expected = tensors_of(tmp_path / "out"), dict(source)
    expected |= {name: tensor.float() for name, tensor in source.items() if name.endswith("A_log")}
    assert same_bits(written, expected)
    check_files(tmp_path / "out")


def test_a_worker_reads_the_form_from_the_directory_of_its_model(folders: dict[str, Path]) -> None:
    """An engine that computes with dequantised weights has no quantization_config."""
    for name, folder in folders.items():
        engine: Any = ShardTransferEngine.__new__(ShardTransferEngine)
        engine.model_config = SimpleNamespace(model=str(folder), hf_config=SimpleNamespace(to_dict=lambda: HF))
        stacked = "model.language_model.layers.0.mlp.experts.gate_up_proj" in architecture(HF).tensors(engine.hf)
        assert stacked == (name == "stacked")


def test_without_files_the_quantisation_tells_the_form() -> None:
    """The published files in FP8 have tensors for each expert, and those in BF16 have stacks."""
    name = "model.language_model.layers.1.mlp.experts.7.down_proj.weight"
    kind = architecture(HF)
    assert kind.tensors(HF | {"quantization_config": CONFIG})[name] == (HIDDEN, WIDTH)
    assert name not in kind.tensors(HF)


def test_a_mixture_of_both_forms_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tensors_of(folders["stacked"]).items() if name not in UNREAD}
    mixed = write(tmp_path / "mixed", tensors | separated(tensors))
    with pytest.raises(UserError, match=r"experts.gate_up_proj is unknown|experts.down_proj is unknown"):
        check_files(mixed)


@pytest.mark.parametrize(("outside", "inside"), [(True, False), (True, None), (False, True), (None, True)])
def test_embeddings_are_tied_in_both_places_or_in_none(outside: bool | None, inside: bool | None) -> None:
    """vLLM reads the text model's key, and transformers the other."""
    hf = {**HF, "text_config": {**HF["text_config"]}}
    for keys, value in ((hf, outside), (hf["text_config"], inside)):
        keys.pop("tie_word_embeddings")
        if value is not None:
            keys["tie_word_embeddings"] = value
    with pytest.raises(UserError, match=r"text_config.tie_word_embeddings is .*; skyrl_mega supports the value of tie"):
        architecture(hf).describe(hf)
