"""Gated delta nets in vLLM's CPU engine, which computes them in bfloat16: rounding errors, syncs, sleep, RL steps."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_mega.engines.vllm.spec import arguments, environment
from skyrl_mega.models.char_tokenizer import write_tokenizer
from skyrl_mega.models.registry import architecture
from skyrl_mega.telemetry.metrics import read
from tests.families import engines
from tests.families.models import DECAY, DELTA_ENGINES, SEEDS, in_bfloat16, make, read_hf
from tests.support.ranks import free_port, run_ranks
from tests.trainer import quickstart

CASES = [(name, "bfloat16") for name in DELTA_ENGINES]
STEPS = 3


def make_models(rank: int, address: str, folder: Path) -> None:
    """Writes both models of every entry, also in bfloat16. Runs in a rank, where transformers is imported already."""
    torch.set_num_threads(1)
    for name in DELTA_ENGINES:
        for seed in SEEDS:
            in_bfloat16(make(name, folder / f"{name}-{seed}", seed), folder / f"{name}-{seed}-bfloat16")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta")
    run_ranks(1, make_models, folder)
    return folder


@pytest.mark.slow
@pytest.mark.nightly
def test_engines_are_as_close_as_bfloat16_and_hold_a_fresh_loads_weights_after_every_sync(models: Path) -> None:
    """Compares with transformers in bfloat16, and bit by bit with an engine that loaded the same files."""
    answers = run_ranks(engines.POLICY.ranks + 1, engines.sweep, models, free_port(), CASES, timeout=800)
    results: dict[str, engines.EngineResults] = answers[-1]
    for name, result in results.items():
        assert len(result.rounding) == len(engines.SYNCS)
        assert all(0 < engine < 2 * other for engine, other in result.rounding.values()), (name, result.rounding)
        assert result.compared > 10
        assert not {occasion: stale for occasion, stale in result.stale.items() if stale}, name
        assert result.check == [], name
        hf = read_hf(models / f"{name.removesuffix(' bfloat16')}-0")
        decays = {tensor for tensor in result.dtypes if tensor.endswith(DECAY)}
        assert decays == architecture(hf).describe(hf).engine_float32
        assert {result.dtypes[tensor] for tensor in decays} == {torch.float32}


def two_workers(rank: int, address: str, folder: Path, name: str) -> tuple[tuple[float, float], list[list[list[str]]]]:
    """Loads an engine of two workers by vLLM's own loader. Returns the rounding errors, and the parameters of each
    worker unlike our boxes of the same files, and of other files."""
    paths = [folder / f"{name}-{seed}-bfloat16" for seed in SEEDS]
    spec = engines._spec(paths[0], "bfloat16", weights="auto")
    extension = {"worker_extension_cls": "tests.support.compared.FileComparison"}
    spec = replace(spec, rollout=replace(engines.ROLLOUT, tensor=2), extra=extension)
    os.environ |= environment(spec)
    from vllm import LLM

    llm = LLM(**arguments(spec))
    errors = engines.rounding_errors(paths[0], engines.ask(llm))
    return errors, [llm.collective_rpc("unlike_files", args=(str(path),)) for path in paths]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", DELTA_ENGINES)
def test_two_workers_hold_the_parts_that_vllm_cuts_itself(name: str, models: Path) -> None:
    [((engine, other), [same, different])] = run_ranks(1, two_workers, models, name, timeout=400)
    assert 0 < engine < 2 * other
    assert same == [[], []]
    for names in different:
        assert {"conv1d.weight", "in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias"} <= {
            name.partition("linear_attn.")[2] for name in names
        }


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", DELTA_ENGINES)
def test_three_steps_of_rl_with_the_engines_routes(name: str, models: Path, tmp_path: Path) -> None:
    """Trains in bfloat16 with two tensor ranks; the policy replays the routes of every token."""
    model = Path(shutil.copytree(models / f"{name}-0-bfloat16", tmp_path / "policy"))
    write_tokenizer(model)
    settings = [
        *("model.build=null", f"model.path={model}", "model.dtype=bfloat16", "warmup.steps=0", "warmup.files=[]"),
        *(*quickstart.LEARNS, f"run.steps={STEPS}", "policy.layout.tensor=2", "policy.moe.replay=rollout"),
    ]
    quickstart.finish(tmp_path, "run.name=run", *settings)
    rows = [row for row in read(tmp_path / "run" / "metrics.jsonl") if "mismatch/logprob_abs_max" in row]
    assert len(rows) == STEPS
    # The last token of an answer has no route: the engine never reads it.
    assert all(row["replay/replayed_fraction"] > 0.9 and row["replay/mismatched"] == 0 for row in rows)
    assert all(row["replay/route_mismatch"] < 0.1 for row in rows), "the policy's own routes differ by rounding only"
    assert all(0 < row["mismatch/logprob_abs_mean"] < 0.05 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
