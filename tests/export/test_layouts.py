"""Exported checkpoints of real ranks in many layouts, against transformers, the policy's log-probs, and the ranks' own
export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.export import job
from skyrl_mega.export.export import ExportResult, export
from skyrl_mega.export.source import find
from tests.export import saved
from tests.megatron.test_against_transformers import expected_logprobs
from tests.support.engines import LOADING, build_model
from tests.support.mxfp4_files import rewrite

LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "MoE, TP2": ("qwen3_moe", 2, {"tensor": 2}, {}),
    "MoE, PP2 VPP2 EP2": ("qwen3_moe", 4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, {"layers": 4}),
    "tied MoE, TP2 EP2": ("qwen3_moe", 2, {"tensor": 2, "expert": 2}, {"tied": True}),
    "dense, TP2 PP2": ("qwen3", 4, {"tensor": 2, "pipeline": 2}, {}),
    "tied dense with biases, PP2": ("qwen2", 2, {"pipeline": 2}, {"tied": True, "head_dim": 16}),
    "experts with biases and other axes on disk, TP2 EP2": ("gpt_oss", 2, {"tensor": 2, "expert": 2}, {}),
    "llama, DP2": ("llama", 2, {}, {}),
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a Hugging Face directory, read by safetensors."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def shorten_vocabulary(model: Path) -> None:
    """Shortens the vocabulary to 103 tokens, padded to 104 by two tensor-parallel ranks."""
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**hf, "vocab_size": hf["vocab_size"] - 1}))
    tensors = tensors_of(model)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def exported(run: Path, output: Path, **changes: Any) -> ExportResult:
    return export(find(run, None, None), output, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_weights_are_the_policys(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports after two steps: transformers agrees with the policy, and all bits equal the ranks' own export."""
    name, ranks, sizes, model = LAYOUTS[layout]
    shorten_vocabulary(build_model(tmp_path / "run" / "model", name, seed=3, **model))
    policy = saved.make_run(tmp_path / "run", ranks, sizes, dtype=torch.float32, steps=2)
    monkeypatch.setattr(job, "SLAB_BYTES", 5000)  # less than most tensors, and no multiple of their rows
    done = exported(tmp_path / "run", tmp_path / "out", file_bytes=100_000, verify=True)
    assert done.verified and done.files > 1
    assert done.nbytes == sum(t.nbytes for t in tensors_of(tmp_path / "out").values())
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "run" / "in_run"))
    with LOADING:
        np.testing.assert_allclose(policy, expected_logprobs(tmp_path / "out", saved.BATCH), atol=1e-4)
    before = {f.name for f in (tmp_path / "run" / "model").iterdir()} - {"model.safetensors"}
    assert before < {f.name for f in (tmp_path / "out").iterdir()}


def test_experts_cut_both_ways_are_the_model_that_was_loaded(tmp_path: Path) -> None:
    """Exports TP2 EP2 ETP2. Gloo cannot gather the uneven shares of such a layout, so the ranks only load and save."""
    build_model(tmp_path / "run" / "model", "qwen3_moe", seed=3)
    saved.make_run(tmp_path / "run", 4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, dtype=torch.float32, steps=0)
    exported(tmp_path / "run", tmp_path / "out", verify=True)
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "run" / "model"))


def test_experts_in_mxfp4_are_exported_as_they_were_loaded(tmp_path: Path) -> None:
    """Exports TP2 EP2 of a source in MXFP4 before a step: every bit is transformers' own dequantisation."""
    run = tmp_path / "run"
    build_model(run / "plain", "gpt_oss", seed=3, hidden=64, expert_ffn=32)
    expected = rewrite(run / "plain", run / "model")
    saved.make_run(run, 2, {"tensor": 2, "expert": 2}, dtype=torch.bfloat16, steps=0)
    done = exported(run, tmp_path / "out", verify=True)
    assert done.verified and done.dtype == "bfloat16"
    assert same(tensors_of(tmp_path / "out"), expected) and same(tensors_of(run / "in_run"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def put_together(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    """Returns the tensors of a kind in a checkpoint, from its entry names and the safetensors reader."""
    tensors: dict[str, Tensor] = {}
    shapes = json.loads((checkpoint / "checkpoint.json").read_text())["tensors"]
    for name, values in tensors_of(checkpoint).items():
        tensor, _, rest = name.partition("[")
        where, _, of = rest.partition("].")
        if of == kind:
            into = tensors.setdefault(tensor, torch.full(shapes[tensor], torch.nan))
            into[tuple(slice(*map(int, axis.split(":"))) for axis in where.split(","))] = values.float()
    return tensors


def test_bfloat16_weights_and_their_float32_masters(tmp_path: Path) -> None:
    """Compares with the ranks' export and with the tensors in the checkpoint. The frozen router lacks a master."""
    build_model(tmp_path / "run" / "model", "qwen3_moe", seed=3)
    saved.make_run(tmp_path / "run", 2, {"tensor": 2, "expert": 2}, dtype=torch.bfloat16, steps=1)
    run, policy = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000001" / "policy"

    done = exported(run, tmp_path / "weights", verify=True)
    weights = tensors_of(tmp_path / "weights")
    assert done.dtype == "bfloat16" and same(weights, tensors_of(run / "in_run"))
    assert '"torch_dtype": "bfloat16"' in (tmp_path / "weights" / "config.json").read_text()

    done = exported(run, tmp_path / "master", origin="master", verify=True)
    masters = tensors_of(tmp_path / "master")
    gates = {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert done.dtype == "float32" and set(done.without_master) == gates
    assert same({name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}, weights)
    for name, tensor in masters.items():
        assert torch.equal(tensor, weights[name].float()) == (name in gates), name
    assert same(masters, put_together(policy, "master") | put_together(policy, "weight"))
    assert set(put_together(policy, "weight")) == gates

    exported(run, tmp_path / "wide", dtype=torch.float32)
    assert same(tensors_of(tmp_path / "wide"), {name: tensor.float() for name, tensor in weights.items()})
    exported(run, tmp_path / "narrow", dtype=torch.bfloat16, origin="master", verify=True)
    assert same(tensors_of(tmp_path / "narrow"), weights)
