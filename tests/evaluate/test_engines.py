"""The command with its own engines, and with vLLM's server: real weights, real HTTP, a real kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import torch

from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.engines.vllm.spec import environment
from skyrl_mega.models.char_tokenizer import VOCABULARY
from skyrl_mega.rollout.agent.renderer import Renderer
from tests.support.engines import LOADING, build_model, spec_of
from tests.support.ranks import free_port
from tests.trainer.quickstart import left_over

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, TOKENS = 40, 3, 32


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds `model/` with sharp distributions, and `data/test.parquet`."""
    folder = tmp_path_factory.mktemp("inputs")
    build_model(folder / "model", "qwen3_moe", seed=5)
    data = str(folder / "data")
    prepare(["addition", "--output", data, "--train", "1", "--test", str(PROMPTS), "--demonstrations", "0"])
    return folder


def command(inputs: Path, output: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "skyrl_mega.evaluate", "--set", f"sums={inputs}/data/test.parquet"),
        *("--output", str(output), f"evaluation.samples={SAMPLES}", "rollout.max_prompt_tokens=40"),
        *(f"rollout.sampling.max_tokens={TOKENS}", *more),
    ]


def engines(inputs: Path, output: Path, concurrency: int) -> subprocess.Popen[str]:
    """Starts the command with an engine; processes are marked for `left_over`."""
    engine_settings = [
        "--model",
        str(inputs / "model"),
        "model.dtype=float32",
        "cluster.device=cpu",
        "rollout.kv_cache_gib=0.1",
    ]
    arguments = command(inputs, output, *engine_settings, f"rollout.concurrency={concurrency}")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SKYRL_MEGA_TEST": str(output)}
    return subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=800)
    assert process.returncode == 0, out
    return out


def lines(output: Path) -> list[str]:
    file = output / "samples" / "sums.jsonl"
    return [s for s in file.read_text().splitlines(keepends=True) if s.endswith("\n")] if file.exists() else []


def samples(output: Path) -> list[dict[str, Any]]:
    rows = pq.read_table(output / "sums.parquet").to_pylist()
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def surprise(model: Path, rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Returns the measured and the expected surprise of every response's tokens under transformers, in nats."""
    with LOADING:
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chat = Renderer(str(model))
    seen, expected = [], []
    for row in rows:
        prompt = chat.first(row["prompt_messages"])
        tokens = prompt + chat.encode(row["response"])
        with torch.no_grad():
            logprobs = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        drawn = torch.tensor(tokens[len(prompt) :])
        seen.append(-float(logprobs.gather(1, drawn[:, None]).sum()))
        expected.append(-float((logprobs.exp() * logprobs).sum()))
    return seen, expected


def are_drawn_from(model: Path, rows: list[dict[str, Any]]) -> None:
    """Checks truncated responses: without an end token, the text contains everything sampled."""
    cut = [row for row in rows if row["status"] == "truncated_tokens"]
    assert len(cut) > 30
    assert all(row["response_tokens"] == TOKENS for row in cut)
    seen, expected = (torch.tensor(values) for values in surprise(model, cut))
    off = seen - expected
    assert abs(off.mean()) < 4 * off.std() / len(off) ** 0.5
    assert expected.mean() < 0.9 * TOKENS * math.log(len(VOCABULARY)), "other weights would show"


@pytest.fixture(scope="module")
def resumed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with two requests at once, kills the run, and resumes with eight."""
    output = tmp_path_factory.mktemp("resumed") / "killed"
    process = engines(inputs, output, concurrency=2)
    deadline = time.monotonic() + 600
    while len(lines(output)) < 20:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while left_over(output) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(output) == []
    kept = lines(output)
    assert 20 <= len(kept) < PROMPTS * SAMPLES, "the kill came in time"

    assert f"{len(kept)} are already answered" in finish(engines(inputs, output, concurrency=8))
    assert lines(output)[: len(kept)] == kept
    assert left_over(output) == []
    return output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_and_resumed_has_every_sample_once(inputs: Path, resumed: Path) -> None:
    rows = samples(resumed)
    assert [(row["uid"], row["sample"]) for row in rows] == [(u, s) for u in range(PROMPTS) for s in range(SAMPLES)]
    assert len({row["response"] for row in rows}) > PROMPTS
    are_drawn_from(inputs / "model", rows)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_killed_and_resumed_equals_never_killed(inputs: Path, resumed: Path, tmp_path: Path) -> None:
    """Compares with an uninterrupted run of 24 requests at once: samples depend on neither."""
    whole = tmp_path / "whole"
    finish(engines(inputs, whole, concurrency=24))
    assert left_over(whole) == []
    assert samples(resumed) == samples(whole)
    assert json.loads((resumed / "scores.json").read_text()) == json.loads((whole / "scores.json").read_text())


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """Runs vLLM's OpenAI-compatible server on a CPU and yields the address."""
    port = free_port()
    arguments = ["--model", str(model), "--served-model-name", "policy", "--dtype", "float32", "--port", str(port)]
    arguments += ["--host", "127.0.0.1", "--max-model-len", "128", "--max-num-seqs", "16", "--enforce-eager"]
    arguments += ["--kv-cache-memory-bytes", str(10**8), "--api-key", "k3y", "--generation-config", "vllm"]
    folder = tempfile.mkdtemp()  # for the server's sockets, which are never removed
    env = os.environ | environment(spec_of(model, RolloutConfig())) | {"TMPDIR": folder}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 600
        url = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health", trust_env=False).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllms_own_server_is_an_endpoint(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    monkeypatch.setenv("POLICY_KEY", "k3y")
    with vllm_server(inputs / "model", tmp_path / "server.log") as url:
        asked = ["--endpoint", url, "--served-model", "policy", "--api-key-variable", "POLICY_KEY"]
        limits = ["rollout.concurrency=16", "rollout.sampling.stop=[Z]"]
        finish(subprocess.Popen(command(inputs, output, *asked, *limits), stdout=subprocess.PIPE, text=True))
    rows = samples(output)
    chat = Renderer(str(inputs / "model"))
    assert all(row["prompt_tokens"] == len(chat.first(row["prompt_messages"])) for row in rows)
    assert any(row["response"].endswith("Z") for row in rows), "vLLM leaves the stop string out, and says which it was"
    assert all(row["response"].count("Z") <= 1 for row in rows)
    are_drawn_from(inputs / "model", rows)
