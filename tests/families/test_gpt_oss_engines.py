"""gpt-oss in vLLM's CPU engine: in bfloat16, started from files in MXFP4, and RL steps with the engine's routes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl_mega.engines.vllm.spec import arguments, environment
from skyrl_mega.models.char_tokenizer import write_tokenizer
from skyrl_mega.telemetry.metrics import read
from tests.families import engines
from tests.families.models import SEEDS, in_bfloat16, make, read_hf
from tests.support.mxfp4_files import rewrite
from tests.support.ranks import free_port, run_ranks
from tests.trainer import quickstart

STEPS = 3
LOGPROBS = 1e-4
MISMATCH = 1e-3


def make_models(rank: int, address: str, folder: Path) -> None:
    """Writes both models, also in bfloat16, and a model in MXFP4 with the values of its files in float32. Runs in a
    rank, where transformers is imported already."""
    torch.set_num_threads(1)
    for seed in SEEDS:
        in_bfloat16(make("gpt_oss", folder / f"gpt_oss-{seed}", seed), folder / f"gpt_oss-{seed}-bfloat16")
    values = rewrite(folder / "gpt_oss-0", folder / "mxfp4")
    plain = folder / "mxfp4-plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(read_hf(folder / "gpt_oss-0")))
    save_file(
        {name: t.float().contiguous() for name, t in values.items()}, plain / "model.safetensors", {"format": "pt"}
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    run_ranks(1, make_models, folder)
    return folder


@pytest.mark.slow
@pytest.mark.nightly
def test_a_bfloat16_engine_is_as_close_as_bfloat16_and_holds_a_fresh_loads_weights(models: Path) -> None:
    """Compares with transformers in bfloat16, and bit by bit with an engine that loaded the same files."""
    cases = [("gpt_oss", "bfloat16")]
    answers = run_ranks(engines.POLICY.ranks + 1, engines.sweep, models, free_port(), cases, timeout=400)
    result: engines.EngineResults = answers[-1]["gpt_oss bfloat16"]
    assert len(result.rounding) == len(engines.SYNCS)
    assert all(0 < engine < 2 * other for engine, other in result.rounding.values()), result.rounding
    assert result.compared > 10 and result.check == []
    assert not {occasion: stale for occasion, stale in result.stale.items() if stale}


def from_mxfp4(rank: int, address: str, folder: Path) -> dict[str, Any]:
    """Starts an engine from files in MXFP4 as a run does, and compares with transformers, and with an engine that
    vLLM loaded from the same values in float32."""
    spec = engines._spec(folder / "mxfp4-plain", "float32", weights="auto")
    os.environ |= environment(spec)
    from vllm import LLM

    fresh = LLM(**arguments(spec))
    answers, expected = engines.ask(fresh), engines.state(fresh)
    llm = LLM(**arguments(replace(spec, path=str(folder / "mxfp4"), dequantised=True)))
    llm.collective_rpc("load_files", args=(str(folder / "mxfp4"),))
    actual = engines.ask(llm)
    return {
        "difference": engines.difference(folder / "mxfp4-plain", actual),
        "unlike": engines.unlike(expected, engines.state(llm)),
        "same answers": actual == answers,
        "compared": len(expected),
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_started_from_mxfp4_computes_with_the_values_of_transformers(models: Path) -> None:
    [results] = run_ranks(1, from_mxfp4, models, timeout=400)
    assert results["difference"] < LOGPROBS
    assert results["unlike"] == [] and results["same answers"] and results["compared"] > 10


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("files", ["gpt_oss-0", "mxfp4"])
def test_three_steps_of_rl_with_the_engines_routes(files: str, models: Path, tmp_path: Path) -> None:
    """Trains with two tensor ranks; the policy replays the routes of every token, in windowed and full layers."""
    model = Path(shutil.copytree(models / files, tmp_path / "policy"))
    write_tokenizer(model)
    settings = [
        *("model.build=null", f"model.path={model}", "model.dtype=float32", "warmup.steps=0", "warmup.files=[]"),
        *(*quickstart.LEARNS, f"run.steps={STEPS}", "policy.layout.tensor=2", "policy.moe.replay=rollout"),
    ]
    quickstart.finish(tmp_path, "run.name=run", *settings)
    rows = [row for row in read(tmp_path / "run" / "metrics.jsonl") if "mismatch/logprob_abs_max" in row]
    assert len(rows) == STEPS
    # The last token of an answer has no route: the engine never reads it.
    assert all(row["replay/replayed_fraction"] > 0.9 and row["replay/mismatched"] == 0 for row in rows)
    assert all(row["replay/route_mismatch"] < 1e-3 for row in rows), "in float32 the policy chooses as the engine does"
    assert all(0 < row["mismatch/logprob_abs_max"] < MISMATCH for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
