"""Any cut of any tensor into records, and any size of slab: against a mapping written down with torch's own views."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.export import job
from skyrl_mega.export.records import Record, StoredTensor
from skyrl_mega.export.work import Different, Worker
from skyrl_mega.layout.box import Box
from skyrl_mega.models.tiny import hf_config
from tests.export.test_layouts import same, tensors_of

SIZES = dict(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=8, experts=4, expert_ffn=8)
KINDS = {
    "MoE": BuildConfig(architecture="qwen3_moe", **SIZES),
    "dense": BuildConfig(architecture="qwen2", tied=True, **SIZES),
}


def stored_from(hf: dict[str, Any], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model as a checkpoint stores it, and as transformers does: both from the same random numbers."""
    generator = torch.Generator().manual_seed(seed)
    moe, layers, width = hf["model_type"] == "qwen3_moe", hf["num_hidden_layers"], hf["head_dim"]
    hidden, groups = hf["hidden_size"], hf["num_key_value_heads"]
    each = hf["num_attention_heads"] // groups
    keys: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    keys["embedding.word_embeddings.weight"] = new(hf["vocab_size"] + 3, hidden)  # three rows of padding
    found["model.embed_tokens.weight"] = keys["embedding.word_embeddings.weight"][:-3]
    if not hf["tie_word_embeddings"]:
        keys["output_layer.weight"] = new(hf["vocab_size"], hidden)
        found["lm_head.weight"] = keys["output_layer.weight"]
    keys["decoder.final_layernorm.weight"] = found["model.norm.weight"] = new(hidden)
    stacks: dict[str, list[Tensor]] = {}
    for i in range(layers):
        here: dict[str, Tensor] = {}
        there = f"model.layers.{i}"

        def named(
            key: str, value: Tensor, name: str = "", here: dict[str, Tensor] = here, there: str = there
        ) -> Tensor:
            here[key] = value
            if name:
                found[f"{there}.{name}"] = value
            return value

        named("self_attention.linear_qkv.layer_norm_weight", new(hidden), "input_layernorm.weight")
        named("mlp.linear_fc1.layer_norm_weight", new(hidden), "post_attention_layernorm.weight")
        for kind, rest in [("weight", (hidden,)), *([] if moe else [("bias", ())])]:
            qkv = named(f"self_attention.linear_qkv.{kind}", new(groups * (each + 2) * width, *rest))
            heads = qkv.view(groups, each + 2, width, *rest)
            found[f"{there}.self_attn.q_proj.{kind}"] = heads[:, :each].reshape(-1, *rest)
            found[f"{there}.self_attn.k_proj.{kind}"] = heads[:, each].reshape(-1, *rest)
            found[f"{there}.self_attn.v_proj.{kind}"] = heads[:, each + 1].reshape(-1, *rest)
        named("self_attention.linear_proj.weight", new(hidden, groups * each * width), "self_attn.o_proj.weight")
        if moe:
            named("self_attention.q_layernorm.weight", new(width), "self_attn.q_norm.weight")
            named("self_attention.k_layernorm.weight", new(width), "self_attn.k_norm.weight")
            named("mlp.router.weight", new(hf["num_experts"], hidden), "mlp.gate.weight")
            fc1 = named("mlp.experts.experts.linear_fc1.weight", new(hf["num_experts"], 2 * 8, hidden))
            fc2 = named("mlp.experts.experts.linear_fc2.weight", new(hf["num_experts"], hidden, 8))
            for e in range(hf["num_experts"]):
                gate, up = fc1[e].chunk(2)
                for name, value in (("gate", gate), ("up", up), ("down", fc2[e])):
                    found[f"{there}.mlp.experts.{e}.{name}_proj.weight"] = value
            keys |= {f"decoder.layers.{i}.{key}": value for key, value in here.items()}
        else:
            gate, up = named("mlp.linear_fc1.weight", new(2 * 8, hidden)).chunk(2)
            found[f"{there}.mlp.gate_proj.weight"], found[f"{there}.mlp.up_proj.weight"] = gate, up
            named("mlp.linear_fc2.weight", new(hidden, 8), "mlp.down_proj.weight")
            for key, value in here.items():
                stacks.setdefault(f"decoder.layers.{key}", []).append(value)
    return keys | {key: torch.stack(values) for key, values in stacks.items()}, found


def cut(keys: dict[str, Tensor], folder: Path, draw: Any) -> dict[str, StoredTensor]:
    """Every tensor in random records: one part of each leading dimension, and the rest cut in rows or in columns."""
    stored = {}
    for key, tensor in keys.items():
        lead = tensor.dim() - (1 if "norm" in key or "bias" in key else 2)
        bounds = [[0, *range(1, n), n] if d < lead else [0, n] for d, n in enumerate(tensor.shape)]
        if lead < tensor.dim():
            d = draw(st.integers(lead, tensor.dim() - 1)) if "qkv" not in key else lead
            bounds[d] = sorted({0, tensor.shape[d], *draw(st.lists(st.integers(1, tensor.shape[d]), max_size=3))})
        records = []
        for at in np.ndindex(*(len(b) - 1 for b in bounds)):
            start = tuple(b[i] for b, i in zip(bounds, at, strict=True))
            stop = tuple(b[i + 1] for b, i in zip(bounds, at, strict=True))
            box = Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
            file = folder / f"{key}.{'.'.join(map(str, start))}"
            file.write_bytes(tensor[box.slices()].contiguous().numpy().tobytes())
            records.append(Record(key, box, tensor.dtype, file, 0, box.numel * 4, data=0))
        stored[key] = StoredTensor(tuple(tensor.shape), tensor.dtype, tuple(records))
    return stored


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("records")
    (folder / "out").mkdir()
    hf = hf_config(KINDS[kind])
    keys, expected = stored_from(hf, seed=1)
    stored = cut(keys, folder, data.draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "SLAB_BYTES", data.draw(st.integers(1, 5000), "slab"))
        planned = job.plan_job(hf, stored, dtype=None, origin="weights", file_bytes=data.draw(st.integers(1, 20_000)))
    for file in planned.files:
        (folder / "out" / file.name).write_bytes(file.header)
    worker = Worker(planned, folder / "out")
    assert sum(worker.write(index) for index in range(len(planned.batches))) == planned.nbytes
    assert same(tensors_of(folder / "out"), expected)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    hf = hf_config(KINDS["MoE"])
    keys, _ = stored_from(hf, seed=1)
    whole = {
        key: StoredTensor(
            tuple(t.shape), t.dtype, (Record(key, Box((0,) * t.dim(), tuple(t.shape)), t.dtype, tmp_path / "f", 0, 0),)
        )
        for key, t in keys.items()
    }

    def planned(stored: dict[str, StoredTensor], **changes: Any) -> job.Job:
        return job.plan_job(hf, stored, **{"dtype": None, "origin": "weights", "file_bytes": 1 << 30, **changes})

    planned(whole)
    router = "decoder.layers.1.mlp.router.weight"
    with pytest.raises(UserError, match=f"has no {router}"):
        planned({key: tensor for key, tensor in whole.items() if key != router})
    with pytest.raises(UserError, match=r"mlp.gate.weight: the checkpoint has 0 of its 64 elements"):
        planned({**whole, router: replace(whole[router], records=())})
    with pytest.raises(UserError, match=r"router.weight: the checkpoint has shape \[4, 17\], config.json makes"):
        planned({**whole, router: replace(whole[router], shape=(4, 17))})
    with pytest.raises(UserError, match="--from master: the checkpoint has no master weights"):
        planned(whole, origin="master")
    half = {key: replace(t, dtype=torch.float16) for key, t in whole.items()}
    half = {
        key: replace(t, records=tuple(replace(r, dtype=torch.float16) for r in t.records)) for key, t in half.items()
    }
    with pytest.raises(UserError, match="allowed are bfloat16 and float32"):
        planned(half)


def test_a_tensor_that_was_written_wrong_is_found(tmp_path: Path) -> None:
    """One bit of one element, where `verify` reads it back."""
    (tmp_path / "out").mkdir()
    hf = hf_config(KINDS["dense"])
    keys, _ = stored_from(hf, seed=1)
    files = {}
    for key, tensor in keys.items():
        files[key] = tmp_path / key
        files[key].write_bytes(tensor.numpy().tobytes())
    stored = {
        key: StoredTensor(
            tuple(t.shape),
            t.dtype,
            (
                Record(
                    key, Box((0,) * t.dim(), tuple(t.shape)), t.dtype, files[key], 0, t.nbytes, 0,
                    zlib.crc32(files[key].read_bytes()),
                ),
            ),
        )
        for key, t in keys.items()
    }  # fmt: skip
    planned = job.plan_job(hf, stored, dtype=None, origin="weights", file_bytes=1 << 30)
    out = tmp_path / "out" / planned.files[0].name
    out.write_bytes(planned.files[0].header)
    worker = Worker(planned, tmp_path / "out")
    for index in range(len(planned.batches)):
        worker.write(index)
    assert sum(worker.compare(index) for index in range(len(planned.records))) * 4 == planned.nbytes
    data = bytearray(out.read_bytes())
    data[planned.files[0].offsets["model.layers.1.self_attn.k_proj.weight"] + 40] ^= 1
    out.write_bytes(data)
    with pytest.raises(Different, match=r"layers\.1\.self_attn\.k_proj\.weight differs"):
        [worker.compare(index) for index in range(len(planned.records))]
    assert json.loads(planned.files[0].header[8:])["__metadata__"] == {"format": "pt"}
