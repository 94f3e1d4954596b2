"""Qwen3.5 as published: files with a vision tower, tensors below another prefix, and experts in stacks or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from skyrl_mega.config.residency import ENGINE
from skyrl_mega.engines.vllm.spec import arguments, environment
from skyrl_mega.hf_checkpoint.copied import unread_note
from skyrl_mega.hf_checkpoint.index import check_files, read_config
from skyrl_mega.hf_checkpoint.load import load
from skyrl_mega.models.registry import architecture
from tests.families import engines, models
from tests.families.layouts import POLICY
from tests.families.models import COMMON, DELTA, read_hf, some_batch
from tests.megatron.layouts import deal, join_ranks, layout, load_model
from tests.support.ranks import run_ranks

LAYOUT = layout(2, tensor=2, expert=2)
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
TOWER = "model.visual."


EXPERTS = "model.language_model.layers.0.mlp.experts"
FORMS = {"stacked": f"{EXPERTS}.gate_up_proj", "separate": f"{EXPERTS}.0.gate_proj.weight"}
"""Form of the files → a tensor: published in BF16, and as transformers saves."""


def make(rank: int, address: str, folder: Path, form: str) -> np.ndarray:
    """Writes a tiny model with a vision tower, and returns the log-probs of `some_batch` by transformers."""
    import transformers

    torch.set_num_threads(1)
    text = {key: value for key, value in (COMMON | DELTA).items() if key != "pad_token_id"}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    config._attn_implementation = config._experts_implementation = "eager"
    model: Any = transformers.Qwen3_5MoeForConditionalGeneration(config).eval()
    models._fill(model, 0)
    model.save_pretrained(folder / "model")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    hf = read_hf(folder / "model")
    hf["text_config"]["dtype"] = "bfloat16"
    (folder / "model" / "config.json").write_text(json.dumps(hf))
    if form == "stacked":
        save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        return models._joined([row.detach() for row in models._logprobs(model, some_batch())])


def train_nothing(rank: int, address: str, folder: Path) -> list[tuple[list[int], np.ndarray]]:
    """Loads the model on two ranks, computes log-probs, and exports the weights."""
    join_ranks(rank, address, LAYOUT)
    worker = load_model(folder / "model", LAYOUT, POLICY)
    rows, micros = deal(some_batch(), worker)
    answer = worker.logprobs(micros)
    worker.export(folder / "exported", folder / "model")
    if answer is None or worker.parallel.coordinates(dist.get_rank()).tp:
        return []
    return [(row, values.numpy()) for row, (values, _) in zip(rows, answer, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_policy_reads_the_text_model_and_an_export_has_every_tensor_of_the_source(tmp_path: Path, form: str) -> None:
    """Compares log-probs with transformers, and the export bit by bit with the source."""
    [expected] = run_ranks(1, make, tmp_path, form)
    source = load_file(tmp_path / "model" / "model.safetensors")
    tower = {name for name in source if name.startswith(TOWER)}
    entries = check_files(tmp_path / "model")
    assert tower and {*entries} == source.keys() - tower
    assert entries[FORMS[form]].shape == ((8, 128, 128) if form == "stacked" else (64, 128))
    note = unread_note(tmp_path / "model", read_config(tmp_path / "model"))
    assert note and note.startswith(f"{len(tower)} tensors") and "model.visual" in note
    batch = some_batch()
    ends = batch.lengths.cumsum(0).tolist()
    seen: set[int] = set()
    for rows, values in (pair for rank in run_ranks(2, train_nothing, tmp_path) for pair in rank):
        wanted = np.concatenate([expected[ends[row] - int(batch.lengths[row]) : ends[row]] for row in rows])
        assert np.abs(values - wanted).max() < 1e-4
        seen |= set(rows)
    assert seen == set(range(len(batch)))
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "exported").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == source.keys()
    assert not [name for name in source if not torch.equal(exported[name], source[name])]
    hf = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert hf["text_config"]["dtype"] == "float32" and hf["model_type"] == "qwen3_5_moe"


def run_engines(rank: int, address: str, folder: Path) -> dict[str, Any]:
    """Compares an engine with weights delivered shard by shard, also after sleep, with one that vLLM loads itself."""
    os.environ |= environment(engines._spec(folder / "model-bfloat16", "bfloat16"))
    from vllm import LLM

    path = folder / "model-bfloat16"
    fresh = LLM(**arguments(engines._spec(path, "bfloat16", weights="auto")))
    expected, answers = engines.state(fresh), engines.ask(fresh)
    llm = LLM(**arguments(engines._spec(path, "bfloat16")))
    results: dict[str, Any] = {"rounding": engines.rounding_errors(path, answers), "compared": len(expected)}
    hf = read_config(path)
    engine = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
    for occasion in ("sync", "sync after sleep"):
        if occasion != "sync":
            llm.collective_rpc("drop", args=(list(ENGINE),))
            llm.collective_rpc("bring_back", args=(list(ENGINE),))
        engine.start_weight_update()
        shard = architecture(hf).engine_shard(hf, 1, 0)
        load(path, shard, engine.parameters, written=engine.parameters.mark_written)
        engine.parameters.close()
        results[occasion] = engines.unlike(expected, engines.state(llm))
        results[occasion] += [] if engines.ask(llm) == answers else ["answers"]
    return results


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_an_engine_takes_the_text_model_of_the_files(tmp_path: Path, form: str) -> None:
    run_ranks(1, make, tmp_path, form)
    models.in_bfloat16(tmp_path / "model", tmp_path / "model-bfloat16")
    [results] = run_ranks(1, run_engines, tmp_path, timeout=600)
    assert results["compared"] > 10 and results["sync"] == results["sync after sleep"] == []
    engine, other = results["rounding"]
    assert 0 < engine < 3 * other
