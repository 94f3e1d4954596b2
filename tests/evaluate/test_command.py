"""The command as a process, against a multiplying endpoint: tables, resuming after a kill, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from skyrl_mega.cli.evaluate import main
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.data.write import write_rows
from skyrl_mega.envs import BaseTextEnv
from skyrl_mega.envs.row import row
from skyrl_mega.models.tiny import build
from skyrl_mega.rollout.agent.seeds import stream_seed
from tests.evaluate.fake import Fake, serving

PROGRAM = [sys.executable, "-m", "skyrl_mega.evaluate"]
SAMPLES = 3


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes `two.parquet` with two data sources and `one.parquet` with one; returns the folder."""
    folder = tmp_path_factory.mktemp("data")

    def product(source: str, a: int) -> dict[str, Any]:
        question = [{"role": "user", "content": f"{a} times 7"}]
        return row(
            data_source=source, prompt=question, env_class="gsm8k", ground_truth=str(7 * a), extra_info={"index": a}
        )

    write_rows((product(("searchR1_nq", "searchR1_tq")[a % 3 == 0], a) for a in range(12)), folder / "two.parquet")
    write_rows((product("openai/gsm8k", a) for a in range(30)), folder / "one.parquet")
    return folder


def command(fake: Fake, data: Path, output: Path, *more: str, at_once: int = 4) -> list[str]:
    return [
        *("--endpoint", fake.url, "--served-model", "m", "--output", str(output)),
        *("--set", str(data / "two.parquet"), "--set", f"gsm8k={data / 'one.parquet'}"),
        *(f"evaluation.samples={SAMPLES}", f"rollout.concurrency={at_once}", "rollout.sampling.max_tokens=9"),
        *more,
    ]


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Runs the command in this process; returns exit code, standard output and standard error."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = main(arguments)
    return code, out.getvalue(), errors.getvalue()


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Starts the command in a separate process."""
    return subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(output: Path) -> list[dict[str, Any]]:
    """Returns all complete lines of all sets."""
    samples = []
    for file in sorted((output / "samples").glob("*.jsonl")):
        samples += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return samples


def seed_of(line: dict[str, Any]) -> int:
    """Returns the seed of a sample's request, the key into the endpoint's record."""
    name = "gsm8k" if line["data_source"] == "openai/gsm8k" else line["data_source"]
    return stream_seed(f"0/evaluate/{name}/{line['uid']}/{line['sample']}/0") >> 32


def said(output: Path) -> dict[tuple[str, int, int], tuple[Any, ...]]:
    """Returns every sample of the parquet files, without times."""
    return {
        (file.stem, r["uid"], r["sample"]): (r["response"], r["reward"], r["accuracy"], r["status"], r["messages"])
        for file in output.glob("*.parquet")
        for r in pq.read_table(file).to_pylist()
    }


def test_sandboxes_for_which_the_node_has_no_memory(fake: Fake, data: Path, tmp_path: Path) -> None:
    options = "environment.options={python: {sandbox: {total_mib: 4000, disk_mib: 50}}}"
    more = [options, "cluster.host_memory_gib=5"]
    code, _, errors = run(command(fake, data, tmp_path / "out", *more, at_once=40))
    assert code == 2 and "cluster.host_memory_gib = 5: the sandboxed programs of 40 trajectories at once" in errors
    assert errors.count("\n") == 1 and not fake.bodies and not (tmp_path / "out").exists()
    assert run(command(fake, data, tmp_path / "out", *more, at_once=10))[0] == 0


def test_tables_scores_and_examples(fake: Fake, data: Path, tmp_path: Path) -> None:
    code, out, errors = run(command(fake, data, tmp_path / "out", "--json"))
    assert code == 0, errors
    assert len(fake.bodies) == 42 * SAMPLES
    assert len(set(fake.asked)) == 42 * SAMPLES, "every sample has a seed of its own"

    table = pq.read_table(tmp_path / "out" / "gsm8k.parquet").to_pydict()
    assert list(zip(table["uid"], table["sample"], strict=True)) == [(u, s) for u in range(30) for s in range(SAMPLES)]
    assert set(table["status"]) == {"completed"}
    assert set(table["response_tokens"]) == {4} and set(table["prompt_tokens"]) == {3}
    right = [f"#### {7 * u}" in r for u, r in zip(table["uid"], table["response"], strict=True)]
    assert [reward == 1 for reward in table["reward"]] == right and 0 < sum(right) < 90

    figures = json.loads(out)
    assert figures == json.loads((tmp_path / "out" / "scores.json").read_text())
    tq, nq, gsm8k = figures["sets"]
    assert [(s["name"], s["prompts"]) for s in (tq, nq, gsm8k)] == [
        ("searchR1_tq", 4),
        ("searchR1_nq", 8),
        ("gsm8k", 30),
    ]
    assert gsm8k["scores"]["accuracy"]["value"] == pytest.approx(np.mean(right))
    assert gsm8k["scores"]["pass"]["value"] == pytest.approx(np.mean(np.reshape(right, (30, SAMPLES)).any(1)))
    accuracies = [s["scores"]["accuracy"]["value"] for s in (tq, nq, gsm8k)]
    assert figures["mean over sets"]["accuracy"]["value"] == pytest.approx(np.mean(accuracies))
    weighted = np.average(accuracies, weights=[4, 8, 30])
    assert figures["mean over examples"]["accuracy"]["value"] == pytest.approx(weighted)

    text = (tmp_path / "out" / "table.md").read_text()
    assert text.strip() in errors
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["## SearchR1, exact match", "## GSM8K, exact match"]
    rows = {cells[1].strip(): cells for line in text.splitlines() if len(cells := line.split("|")) > 3}
    assert rows["NQ†"][2].strip().startswith(f"{accuracies[1]:.3f} ±")
    assert rows["PopQA†"][2].strip() == "–"
    assert rows["PopQA†"][3].strip() == "0.391"


class Breaks(BaseTextEnv):
    """An environment whose trajectories always fail."""

    def step(self, action: str) -> Any:
        raise ValueError("no judge")


def test_where_all_samples_failed_the_code_is_2_and_they_are_kept(fake: Fake, data: Path, tmp_path: Path) -> None:
    broken = f"environment.classes.gsm8k={__file__}:Breaks"
    code, _, errors = run(command(fake, data, tmp_path / "out", broken))
    assert code == 2 and "the environments of all samples failed, so there are no scores" in errors.splitlines()[-1]
    figures = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert [(s["failed"], s["scores"]) for s in figures["sets"]] == [(1.0, {})] * 3
    assert (tmp_path / "out" / "gsm8k.parquet").exists()


def test_what_failed_for_the_infrastructure_is_drawn_again(fake: Fake, data: Path, tmp_path: Path) -> None:
    """Draws infrastructure failures again, but not failures of the environment."""
    output = tmp_path / "out"
    assert run(command(fake, data, output))[0] == 0
    whole, fake.bodies[:] = said(output), []
    file = output / "samples" / "gsm8k.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["status"], rows[1]["status"] = "error_infrastructure", "error_env"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for asked in (1, 0):
        fake.bodies.clear()
        assert run(command(fake, data, output))[0] == 0
        assert len(fake.bodies) == asked
    assert said(output).keys() == whole.keys()
    table = pq.read_table(output / "gsm8k.parquet").to_pylist()
    assert [row["status"] for row in table].count("error_infrastructure") == 0
    assert [row["status"] for row in table].count("error_env") == 1


def test_killed_and_resumed_equals_never_killed(fake: Fake, data: Path, tmp_path: Path) -> None:
    assert run(command(fake, data, tmp_path / "whole"))[0] == 0
    every = [seed for _, seed in fake.asked]
    fake.bodies.clear()

    # The endpoint answers 50 requests and then leaves all open: the kill interrupts some.
    fake.delay = lambda number: 0.0 if number <= 50 else 3600.0
    output = tmp_path / "killed"
    process = start(command(fake, data, output))
    try:
        deadline = time.monotonic() + 300
        while len(fake.bodies) < 54 or len(lines(output)) < 50:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not list(output.glob("*.parquet"))
    kept = lines(output)
    assert len(kept) == 50
    # The worst result of a kill: half a line.
    with (output / "samples" / "gsm8k.jsonl").open("a") as file:
        file.write('{"uid": 3, "sam')

    fake.bodies.clear()
    fake.delay = lambda number: 0.0
    code, out, _ = run(command(fake, data, output))
    assert code == 0
    assert f"{42 * SAMPLES} samples; 50 are already answered" in out
    assert len(fake.bodies) == 42 * SAMPLES - 50
    saved_seeds = {seed_of(k) for k in kept}
    assert saved_seeds < set(every)
    assert {seed for _, seed in fake.asked} == set(every) - saved_seeds, "what is there is not asked again"
    assert said(output) == said(tmp_path / "whole")
    assert len(said(output)) == 42 * SAMPLES
    assert (output / "table.md").read_text() == (tmp_path / "whole" / "table.md").read_text()

    fake.bodies.clear()
    assert run(command(fake, data, output))[0] == 0
    assert fake.bodies == [], "nothing is missing, nobody is asked"

    assert run(command(fake, data, output, f"evaluation.samples={SAMPLES + 1}", "evaluation.limit=5"))[0] == 0
    assert len(fake.bodies) == 5 + 5 + 4, "one more sample of each prompt"


def test_another_model_or_other_settings_are_refused_by_name(fake: Fake, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run(command(fake, data, output, "evaluation.limit=2"))[0] == 0
    fake.bodies.clear()
    for more, part in (
        (["--served-model", "other"], '--served-model = "m", and this one has "other"'),
        (["evaluation.temperature=0.5"], "evaluation.temperature = 1.0, and this one has 0.5"),
        (["run.seed=3"], "run.seed = 0, and this one has 3"),
        (["rollout.max_turns=2"], "rollout.max_turns = 1, and this one has 2"),
        (["--request", '{"reasoning_effort": "low"}'], '--request = {}, and this one has {"reasoning_effort": "low"}'),
    ):
        code, _, errors = run(command(fake, data, output, "evaluation.limit=2", *more))
        assert code == 2
        assert len(errors.splitlines()) == 1 and part in errors
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "table.md").write_text("mine")
    code, _, errors = run(command(fake, data, thesis, "evaluation.limit=2"))
    assert code == 2 and "the folder contains table.md but no evaluation" in errors
    assert (thesis / "table.md").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    question = [{"role": "user", "content": "3 times 7"}]
    rows = [row(data_source="x", prompt=question, env_class="gsm8k", ground_truth="21", extra_info={"index": 0})] * 2
    write_rows(iter(rows), other / "one.parquet")
    write_rows(iter(rows), other / "two.parquet")
    code, _, errors = run(command(fake, other, output, "evaluation.limit=2"))
    assert code == 2
    assert re.search(r"row [01] of the set gsm8k differs from the row that its saved samples", errors), errors
    assert fake.bodies == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_75_and_leaves_nothing(fake: Fake, data: Path, tmp_path: Path, number: int) -> None:
    fake.delay = lambda n: 0.0 if n <= 20 else 3600.0
    process = start(command(fake, data, tmp_path / "out"))
    try:
        deadline = time.monotonic() + 300
        while len(fake.bodies) < 24:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert f"stopped by {signal.Signals(number).name}; the same command resumes with the missing samples" in errors
    assert "Traceback" not in errors
    assert len(lines(tmp_path / "out")) == 20


def test_a_fault_is_exit_code_1_and_what_ended_is_kept(fake: Fake, data: Path, tmp_path: Path) -> None:
    fake.script.extend([{}] * 10 + [(200, {}, "<html>")])
    code, out, errors = run(command(fake, data, tmp_path / "out", at_once=1))
    assert code == 1
    assert "fault: " in out and "did not answer as OpenAI's chat completions" in out
    assert errors == ""
    assert len(lines(tmp_path / "out")) == 10


@pytest.mark.parametrize(
    "arguments, part",
    [
        ([], "model.path is not set"),
        (["--model", "/does/not/exist"], "/does/not/exist is not there"),
        (["--endpoint", "http://127.0.0.1:1"], "--served-model"),
        (["--endpoint", "http://127.0.0.1:1", "--served-model", "m"], "data.eval is empty"),
        (["--endpoint", "http://127.0.0.1:1", "--served-model", "m", "--set", "a=b"], "b does not exist"),
        (["--endpoint", "http://127.0.0.1:1", "--served-model", "m", "--set", "a/b=c"], "--set a/b=c: allowed"),
        (["--served-model", "m"], "--endpoint"),
        (["--publish", "x"], "--publish"),
        (["evaluation.samples=0"], "evaluation.samples"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], part: str, tmp_path: Path) -> None:
    code, out, errors = run([*arguments, f"run.directory={tmp_path}"])
    assert (code, out) == (2, "")
    assert len(errors.splitlines()) == 1 and part in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.options.quantization=fp8_per_block",
        "rollout.options.hf_overrides={quantization_config: {quant_method: fp8, weight_block_size: [128, 128]}}",
    ],
)
def test_fp8_is_refused_for_a_model_not_tested_with_fp8(setting: str, data: Path, tmp_path: Path) -> None:
    """Asks for engines in FP8 with latent attention, in both ways of asking."""
    build(BuildConfig(architecture="deepseek_v3", layers=1), tmp_path / "model")
    output = tmp_path / "out"
    given = ["--model", str(tmp_path / "model"), "--set", str(data / "one.parquet"), "--output", str(output), setting]
    code, out, errors = run(given)
    assert (code, out, errors.count("\n")) == (2, "", 1) and not output.exists()
    assert "rollout.options" in errors and "FP8 has not been tested with multi-head latent attention" in errors


def test_a_refused_key_is_exit_code_2(fake: Fake, data: Path, tmp_path: Path) -> None:
    fake.script.extend([(401, {}, '{"error": {"message": "who are you?"}}')] * 8)
    code, _, errors = run(command(fake, data, tmp_path / "out", "--api-key-variable", "NO_SUCH_KEY"))
    assert code == 2
    assert "HTTP 401: who are you?; the environment variable NO_SUCH_KEY is not set" in errors
    assert os.environ.get("NO_SUCH_KEY") is None
