"""`python -m skyrl_mega.weights logprobs`: pairs, verdict and worst tokens on artificial figures, then on real
processes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from skyrl_mega.cli.weights import main
from skyrl_mega.cli.weights_logprobs import (
    AGAIN,
    ENGINE,
    POLICY,
    TRANSFORMERS,
    LogprobComparison,
    _transformers,
    aligned,
    pairs_of,
    table,
    verdict_of,
    worst_of,
)
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.models import tiny
from skyrl_mega.trajectories.sequences import Sequences
from tests.support.engines import build_model_of
from tests.trainer.quickstart import ROOT, SMALL

RNG = np.random.default_rng(0)
TRUE = -RNG.random(500)


def noisy(scale: float) -> np.ndarray:
    return TRUE + scale * RNG.standard_normal(500)


@pytest.mark.parametrize(
    ("engine", "policy", "transformers", "says"),
    [
        (0.0, 0.0, 0.0, "engine and policy agree"),
        (0.3, 1e-4, 1e-4, "the engine is the odd one out"),
        (1e-4, 0.3, 1e-4, "the policy is the odd one out"),
        (0.2, 0.2, 0.0, "both differ from transformers in float32: their precision"),
    ],
)
def test_the_verdict_names_the_odd_one_out(engine: float, policy: float, transformers: float, says: str) -> None:
    logprobs = {ENGINE: noisy(engine), POLICY: noisy(policy), TRANSFORMERS: noisy(transformers)}
    verdict, agree = verdict_of(pairs_of(logprobs), 0.05, None)
    assert says in verdict and agree == ("agree" in says)


def test_pairs_are_numpys_over_what_both_have() -> None:
    engine, again = noisy(0.1), noisy(0.1)
    again[300:] = math.nan
    [of_policy, of_again] = pairs_of({ENGINE: engine, POLICY: TRUE, AGAIN: again})
    d = engine - TRUE
    assert (of_policy.tokens, of_again.tokens) == (500, 300)
    assert of_policy.mean == pytest.approx(np.abs(d).mean()) and of_policy.signed == pytest.approx(d.mean())
    assert of_policy.most == np.abs(d).max() and of_policy.p99 == np.quantile(np.abs(d), 0.99, method="inverted_cdf")
    assert of_again.mean == pytest.approx(np.abs(engine - again)[:300].mean())
    verdict, _ = verdict_of([of_policy, of_again], 1.0, None)
    assert verdict.endswith(f"playing again moves the engine itself by {of_again.mean:.1e} nats")
    assert "top_p" in verdict_of([of_policy], 0.01, "rollout.sampling.top_p=0.9: …")[0]


def batch_of(*sequences: list[int]) -> Sequences:
    flat = [token for tokens in sequences for token in tokens]
    return Sequences(torch.tensor([len(s) for s in sequences]), torch.tensor(flat, dtype=torch.int32))


def test_the_second_playing_counts_up_to_where_its_tokens_part() -> None:
    first, second = batch_of([1, 2, 3, 4], [5, 6], [7, 8, 9]), batch_of([1, 2, 9, 4, 4], [5, 6, 7], [7, 8, 9])
    second["rollout_logprobs"] = torch.arange(11, dtype=torch.float32)
    expected = [0, 1, math.nan, math.nan, 5, 6, 8, 9, 10]
    assert np.array_equal(aligned(first, second).numpy(), expected, equal_nan=True)


def test_the_worst_tokens_are_named_with_their_place() -> None:
    batch = batch_of([1, 2, 3], [4, 5, 6, 7])
    engine = torch.tensor([9.0, -1, -1, 9, -1, -3, -1])
    policy = torch.tensor([0.0, -1, -2, 0, -1, -1, -1.5])
    counts = torch.tensor([False, True, True, False, True, True, True])
    worst = worst_of(batch, {ENGINE: engine, POLICY: policy}, counts, 2, lambda tokens: f"{tokens}")
    assert [(w.sample, w.position, w.text) for w in worst] == [(1, 2, "'[4, 5, 6]'"), (0, 2, "'[1, 2, 3]'")]
    lines = table(LogprobComparison([], worst, "they differ", False)).splitlines()
    assert lines[3].split() == ["1", "2", "-3.0000", "-1.0000", "'[4,", "5,", "6]'"] and lines[-1] == "they differ"


@pytest.mark.parametrize("arguments", [[], ["--config", "x.yaml", "--prompts", "0"]])
def test_wrong_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logprobs", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()[-1:]) == 1


@pytest.mark.parametrize("command", ["check", "logprobs"])
def test_a_fault_of_a_service_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*args: Any, **options: Any) -> None:
        raise InfrastructureFault("the sandbox\ndoes not start")

    monkeypatch.setattr(f"skyrl_mega.cli.weights_{command}.compare", compare)
    assert main([command, "--config", "x.yaml"]) == 1
    assert capsys.readouterr().err == "fault: the sandbox does not start\n"


def of_transformers(path: Path, answers: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
    """Returns log-probs of each sequence's tokens except the first: logits of transformers, else plain Python."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs = []
    for tokens in answers:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].tolist()
        logprobs.append([])
        for row, token in zip(logits[:-1], tokens[1:], strict=True):
            total = math.fsum(math.exp(logit / temperature) for logit in row)
            logprobs[-1].append(row[token] / temperature - math.log(total))
    return logprobs


def test_transformers_is_asked_for_each_sequence_at_the_temperature(tmp_path: Path) -> None:
    sizes = BuildConfig(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, experts=4, expert_ffn=16)
    build_model_of(tmp_path, tiny.hf_config(sizes), seed=1)
    answers = [[5, 40, 41, 9, 77], [6], [30, 31, 99]]
    actual = _transformers(batch_of(*answers), tmp_path, 0.7)
    expected = [value for logprobs in of_transformers(tmp_path, answers, 0.7) for value in (0.0, *logprobs)]
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-5)
    assert np.std(expected) > 0.1, "or any order would do"


def sequences(worst: list[dict[str, Any]], tokenizer: Any) -> dict[int, list[int]]:
    """Returns the tokens of each sample from the texts shown before its last token; a final end token is not shown."""
    tokens_by_sample = {}
    for last in sorted(worst, key=lambda w: w["position"]):
        tokens = tokenizer.encode(last["text"][1:-1].replace("\\n", "\n"), add_special_tokens=False)
        tokens_by_sample[last["sample"]] = [*tokens, tokenizer.eos_token_id][: last["position"] + 1]
        assert len(tokens_by_sample[last["sample"]]) == last["position"] + 1
    return tokens_by_sample


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_policy_and_transformers_agree_in_float32(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "skyrl_mega.weights",
        "logprobs",
        "--json",
        "--prompts",
        "4",
        "--worst",
        "999",
        "--config",
    ]
    data = f"data.prepare=addition --output {tmp_path}/data --train 40 --test 8 --demonstrations 8"
    files = [f"data.train=[{tmp_path}/data/train.parquet]", f"data.eval=[{tmp_path}/data/test.parquet]"]
    mine = [*SMALL, f"model.path={tmp_path}/model", data, *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "configs" / "quickstart.yaml"), *mine], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(p["first"], p["second"]) for p in result["pairs"]] == [
        (ENGINE, POLICY), (ENGINE, TRANSFORMERS), (POLICY, TRANSFORMERS), (ENGINE, AGAIN)
    ]  # fmt: skip
    assert result["pairs"][-1]["most"] == 0 and result["agree"]
    # All tokens are shown, so every figure can be computed here.
    worst = result["worst"]
    tokens_by_sample = sequences(worst, transformers.AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert sorted(tokens_by_sample) == list(range(16)) and len(worst) > 50
    expected = dict(
        zip(tokens_by_sample, of_transformers(tmp_path / "model", list(tokens_by_sample.values())), strict=True)
    )
    for w in worst:
        right = expected[w["sample"]][w["position"] - 1]
        assert w["logprobs"] == {name: pytest.approx(right, abs=1e-4) for name in (ENGINE, POLICY, AGAIN, TRANSFORMERS)}
    assert np.std([w["logprobs"][ENGINE] for w in worst]) > 0.05
    for p in result["pairs"]:
        d = np.array([w["logprobs"][p["first"]] - w["logprobs"][p["second"]] for w in worst])
        assert p["tokens"] == len(worst) and p["most"] == np.abs(d).max() < 1e-4
        assert (p["mean"], p["signed"]) == (pytest.approx(np.abs(d).mean()), pytest.approx(d.mean(), abs=1e-12))
