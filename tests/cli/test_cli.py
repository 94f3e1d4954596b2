"""The command line as a process: exit codes, one-line messages, no remains."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from skyrl_mega.cli.train import main
from skyrl_mega.config.schema import Config
from skyrl_mega.planner import fixes
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer import train
from tests.support.machine import within

LAUNCH = [sys.executable, "-m", "skyrl_mega.launch"]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["policy.layout.tensr=2"], "did you mean policy.layout.tensor?"),
        (["model.path=/does/not/exist"], "model.path"),
        (["policy.layout.tensor=3", "policy.ranks=3", "policy.layout.expert=1"], "4 attention heads"),
        (["environment.default=nope"], "environment 'nope' is unknown"),
        (["--dryrun"], "--dryrun"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    inputs: Path, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(inputs / "config.yaml"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and part in err
    assert not (inputs / "runs").exists()


def test_a_process_ends_with_the_same_line_and_code(inputs: Path) -> None:
    ended = launch("--config", str(inputs / "config.yaml"), "environment.default=nope")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1 and "environment 'nope' is unknown" in ended.stderr


def test_a_wrong_key_is_answered_at_once_without_torch(inputs: Path) -> None:
    program = (
        "import sys, time; from skyrl_mega.cli.train import main\n"
        f"code = main(['--config', {str(inputs / 'config.yaml')!r}, 'polcy.ranks=2'])\n"
        "slow = {'torch', 'ray', 'vllm', 'transformers', 'megatron'}\n"
        "print(code, sorted(slow & set(sys.modules)), time.process_time())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    code, modules, seconds = ended.stdout.split(maxsplit=2)
    assert (code, modules) == ("2", "[]")
    assert within(float(seconds), 5)


def test_json_says_the_error_too(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--config", str(inputs / "config.yaml"), "run.seed=x"]) == 2
    problem = "allowed is a whole number from 0 to 4294967295"
    fields = {"key": "run.seed", "value": "x", "problem": problem}
    assert json.loads(capsys.readouterr().out) == {"error": f"run.seed = x: {problem}", **fields}


def test_a_dry_run_prints_settings_and_seats_and_starts_nothing(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--config",
        str(inputs / "config.yaml"),
        "--dry-run",
        "--settings",
        "policy.layout.tensor=2",
        "run.seed=7",
    ]
    ended = launch(*arguments)
    assert ended.returncode == 0, ended.stderr
    tables, _, settings = ended.stdout.partition("\nsettings:\n")
    assert yaml.safe_load(settings)["run"]["seed"] == 7
    assert tables.startswith("it can run on this CPU: 4 ranks, about ")
    assert "policy: 4 ranks, TP2 DP2 EP2 EDP2" in tables
    assert tables.endswith("nothing was started (--dry-run)\n")
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["policy"]["layout"]["tensor"] == 2
    assert [seat["tp"] for seat in plan["policy"]] == [0, 1, 0, 1]
    assert not (inputs / "runs").exists()


@pytest.mark.parametrize("options", [["--dry-run", "--suggest"], ["--suggest", "8", "--dry-run", "run.seed=1"]])
def test_a_dry_run_and_a_search_are_two_commands(
    inputs: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(inputs / "config.yaml"), *options]) == 2
    assert "--suggest --dry-run: give one of them" in capsys.readouterr().err


def test_a_run_too_asks_whether_it_fits(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixes, "SECONDS", 0.5)  # nothing fits: the search for a fix would try everything
    arguments = ["--config", str(inputs / "config.yaml"), f"run.directory={tmp_path}", "cluster.host_memory_gib=1"]
    assert main(arguments) == 2
    assert "cluster.host_memory_gib = 1: node 0 needs about" in capsys.readouterr().err


def test_options_may_stand_between_settings(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "run.seed=3",
                "--config",
                str(inputs / "config.yaml"),
                "run.steps=4",
                "--dry-run",
                "run.name=q",
                "--settings",
            ]
        )
        == 0
    )
    run = yaml.safe_load(capsys.readouterr().out.partition("\nsettings:\n")[2])["run"]
    assert (run["seed"], run["steps"], run["name"]) == (3, 4, "q")


def test_relative_paths_may_begin_elsewhere(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(inputs)
    arguments = ["--config=config.yaml", "--dry-run", "model.path=model"]
    assert main([*arguments, "--directory=nowhere"]) == 2
    assert "--directory nowhere: No such file or directory" in capsys.readouterr().err
    assert main([*arguments, f"--directory={tmp_path}"]) == 2
    assert "model.path" in capsys.readouterr().err
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_it_with_75_and_the_folder_is_free_again(inputs: Path, tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [
            *LAUNCH,
            "--config",
            str(inputs / "config.yaml"),
            f"run.directory={tmp_path}",
            f"data.train=[{tmp_path}/multiply/train.parquet]",
            f'data.prepare="multiply --output {tmp_path}/multiply --train 5000000"',
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "prepare data …\n"
        time.sleep(0.2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    resumes = "the same command resumes from the newest checkpoint, if there is one"
    assert errors == f"stopped by {signal.Signals(number).name}; {resumes}\n"
    assert list(tmp_path.rglob("*train.parquet*")) == []
    with (tmp_path / "r" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_whose_folder_is_gone_says_so_all_the_same(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(config: Config, folder: Path, console: Console) -> None:
        shutil.rmtree(folder)
        (folder / "checkpoints").mkdir()

    monkeypatch.setattr(train, "train", gone)
    assert main(["--config", str(inputs / "config.yaml"), f"run.directory={tmp_path}"]) == 1
    output = capsys.readouterr()
    assert "fault: [Errno 2] No such file or directory" in output.out
    assert "Traceback" in output.err  # no log can receive the traceback
