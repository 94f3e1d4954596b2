"""`docs/own-environment.md` as followed by a newcomer: files pasted, named in the configuration, launched.

Once with the page's class and rows over several turns, once with the documents' class and rows (single turn). Only the
model differs from the page: the run builds and warms up a tiny model.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status
from tests.envs.test_contract import example_of_the_documents, loop_of_the_documents
from tests.trainer.quickstart import ROOT, left_over, user_python

PAGE = ROOT / "docs" / "own-environment.md"
TINY = [
    "run.steps=2",
    "model.path=tiny",
    "model.build={hidden: 64, layers: 1, experts: 4, max_length: 256}",
    "rollout.concurrency=64",
    "rollout.sampling.max_tokens=16",
    "data.prompts_per_step=8",
    "warmup.steps=150",
    "warmup.batch=32",
    "warmup.lr=3e-3",
    "warmup.files=[shown.parquet]",
    "evaluation.limit=8",
    "checkpoint.every=0",
    "telemetry.trackers=[]",
]


def blocks() -> list[str]:
    """Returns the page's files and the class to add, in the page's order."""
    return re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def paste(folder: Path, environment: str, rows: str) -> None:
    """Writes the three files and the rows, with demonstrations for the tiny model, half of them right."""
    (folder / "my_env.py").write_text(environment, encoding="utf-8")
    (folder / "my_rows.py").write_text(rows, encoding="utf-8")
    (folder / "my_run.yaml").write_text(blocks()[2], encoding="utf-8")
    user_python(folder, "my_rows.py")
    shown = pq.read_table(folder / "train.parquet").to_pylist()
    for i, row in enumerate(shown):
        answer = int(row["reward_spec"]["ground_truth"]) + i % 2
        row["extra_info"] = {"demonstration": f"\\boxed{{{answer}}}"}
    pq.write_table(pa.Table.from_pylist(shown), folder / "shown.parquet")


def launch(folder: Path, *settings: str) -> list[parquet.Trajectory]:
    """Runs two steps of the page's run with the tiny model and returns the trajectories of both steps."""
    user_python(folder, "-m", "skyrl_mega.launch", "--config", "my_run.yaml", *TINY, *settings)
    assert left_over(folder) == []
    before, *steps = read(folder / "runs" / "my_run" / "metrics.jsonl")
    assert any(name.startswith("eval/") for name in before)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/failed_fraction"] == 0 and row["mismatch/logprob_abs_mean"] < 1e-3
    assert max(row["policy/grad_norm"] for row in steps) > 0
    files = sorted((folder / "runs" / "my_run" / "trajectories").glob("step_*.parquet"))
    played = [parquet.read(file) for file in files]
    assert [len(p) for p in played] == [32, 32]
    for trajectories, row in zip(played, steps, strict=True):
        assert sum(t.reward for t in trajectories) / 32 == pytest.approx(row["reward/mean"])
        assert sum(t.turns for t in trajectories) / 32 == pytest.approx(row["rollout/turns_mean"])
    return [t for trajectories in played for t in trajectories]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pages_files_over_several_turns(tmp_path: Path) -> None:
    environment, rows, *others = blocks()
    patient = next(block for block in others if "class PatientMultiplyEnv" in block)
    paste(tmp_path, environment + "\n\n" + patient, rows)
    mine = "environment.classes.multiply=my_env.py:PatientMultiplyEnv"
    played = launch(tmp_path, mine, "rollout.max_turns=3", "rollout.max_response_tokens=128")
    assert max(t.turns for t in played) > 1
    assert any(t.reward > 0 for t in played)
    for t in played:
        assert t.metadata["turn"] == t.turns <= 3  # counted only by the page's class
        replies = [m["content"] for m in t.messages if m["role"] == "user"][1:]
        assert set(replies) <= {"No. Try again."} and len(replies) >= t.turns - 1
        if t.reward:
            assert (
                t.status is Status.COMPLETED
                and f"\\boxed{{{t.prompt.extras['reward_spec']['ground_truth']}}}" in (t.messages[-1]["content"])
            )


@pytest.mark.slow
@pytest.mark.nightly
def test_the_documents_class_and_rows(real_data: Path, tmp_path: Path) -> None:
    """Launches the documents' class and loop in place of the page's class and loop."""
    environment, rows, *_ = blocks()
    loop = textwrap.indent(loop_of_the_documents(real_data), "    ")
    loop_start, after = rows.index("    for _ in range(num_examples):"), rows.index("    pq.write_table(")
    imports = environment[: environment.index("class MultiplyEnv")]
    paste(tmp_path, imports + example_of_the_documents(real_data), rows[:loop_start] + loop + rows[after:])
    played = launch(tmp_path, "rollout.max_turns=3")
    assert any(t.reward > 0 for t in played) and any(not t.reward for t in played)
    # The documents' class is done after a wrong answer; the built-in class of the same name would continue.
    assert {t.turns for t in played} == {1}
    assert {t.prompt.extras["data_source"] for t in played} == {"synthetic_multiply"}
    assert any(t.status is Status.COMPLETED and not t.reward for t in played)


MISTAKES = {
    "another file": ("my_evn.py:MultiplyEnv", None, "my_evn.py does not exist"),
    "another class": ("my_env.py:MultiplyEnvironment", None, "did you mean MultiplyEnv?"),
    "no class": ("my_env.py", None, "allowed: package.module:Class or path/to/file.py:Class"),
    "no step": ("my_env.py:MultiplyEnv", ("def step", "def judge"), "MultiplyEnv has no step"),
    "no import": (
        "my_env.py:MultiplyEnv",
        ("from skyrl_mega", "# from skyrl_mega"),
        "add `from skyrl_mega.envs import",
    ),
    "an error": (
        "my_env.py:MultiplyEnv",
        ("import re\n", "import re\n1 / 0\n"),
        "my_env.py, line 3 cannot be imported: Zero",
    ),
}


@pytest.mark.slow
def test_mistakes_are_one_line_before_anything_starts(tmp_path: Path) -> None:
    """Launches every mistake inside a single process."""
    environment, rows, *_ = blocks()
    paste(tmp_path, environment, rows)
    cases = []
    for number, (path, change, _) in enumerate(MISTAKES.values()):
        if change:
            spoiled = tmp_path / f"case{number}"
            spoiled.mkdir()
            (spoiled / "my_env.py").write_text(environment.replace(*change), encoding="utf-8")
            path = f"case{number}/{path}"
        cases.append(f"environment.classes.multiply={path}")
    program = (
        "import contextlib, io, json, sys\n"
        "from skyrl_mega.cli.train import main\n"
        "for case in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        code = main(['--config', 'my_run.yaml', *json.loads(sys.argv[2]), case])\n"
        "    print(json.dumps([code, said.getvalue(), 'ray' in sys.modules]))\n"
    )
    output = user_python(tmp_path, "-c", program, json.dumps(cases), json.dumps(TINY))
    answers = [json.loads(line) for line in output.splitlines()]
    for (_, _, expected), (code, output, started) in zip(MISTAKES.values(), answers, strict=True):
        assert code == 2 and not started
        assert len(output.splitlines()) == 1 and "environment.classes.multiply" in output and expected in output
    assert not (tmp_path / "runs").exists()
