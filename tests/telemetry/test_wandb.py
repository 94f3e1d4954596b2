"""Weights & Biases, offline, with the real package; a run is read by the package's own `wandb leet inspect`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli.inputs import check_inputs
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.telemetry.trackers import registry
from tests.telemetry.network import Proxy

ROOT = Path(__file__).parents[2]
COLUMNS = ["prompt", "response", "reward", "status", "environment"]
SECRET = "sk-" + "abcdefghij" * 4
SETTINGS = (
    "run.name=first",
    "run.seed=7",
    "telemetry.trackers=[wandb]",
    "telemetry.options.wandb.mode=offline",
    "telemetry.options.wandb.project=proof",
    "telemetry.options.wandb.tags=[cpu]",
    f"environment.options.mine.api_key={SECRET}",
)
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from skyrl_mega.config.compose import compose
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.trackers import open_trackers
from tests.telemetry.network import listening

folder, resumed, last, end, *settings = sys.argv[1:]
config, resumed = compose(None, settings), int(resumed) or None
trackers = open_trackers(config, Path(folder), lambda line: print(line, flush=True))
trackers.start(config, resumed)
for step in range((resumed or 0) + 1, int(last) + 1):
    trackers.log_trajectories(step, [TrajectoryText("1+1=", f"{step}", step / 2, "done", "addition")])
    trackers.log(step, {"reward/mean": step / 4, "time/sync": 1.0, "time/sync/plan": 0.5, "a": float("nan")})
given = Path(folder) / "trackers" / "wandb.json"
while end == "wait" or not given.exists() or json.loads(given.read_text())["last_step"] < int(last):
    time.sleep(0.1)
print("listening", *listening(os.getpid()), flush=True)
trackers.close()
"""


def started(folder: Path, proxy: Proxy, resumed: int, last: int, end: str, *settings: str) -> subprocess.Popen[str]:
    """Starts a process that logs the steps after `resumed`, and then waits to be killed or closes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NO_PROXY", "no_proxy"))}
    env |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), proxy.url)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(resumed), str(last), end, *SETTINGS, *settings],
        env={**env, "HOME": str(folder.parent), "PYTHONPATH": str(ROOT)},
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def records(piece: Path) -> list[dict[str, Any]]:
    """Returns the records of a run's folder, read by the package."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(piece)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(piece: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's folder."""
    return [record["history"] for record in records(piece) if record["type"] == "history"]


def pieces(folder: Path) -> list[Path]:
    """Returns a folder for each start of the run, the oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"))


@dataclass
class Played:
    """A run killed after step 5, resumed after step 2 with another setting, up to step 7."""

    folder: Path
    rows: list[list[dict[str, Any]]]
    """Rows of each start."""
    last: list[dict[str, Any]]
    """All records of the second start."""
    printed: list[str]
    asked: list[bytes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("wandb") / "first"
    proxy = Proxy()
    proxy.start()
    process = started(folder, proxy, 0, 5, "wait")
    deadline, rows = time.monotonic() + 240, []
    while len(rows) < 5 and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        rows = history(pieces(folder)[0]) if any((folder / "wandb").glob("offline-run-*/*.wandb")) else []
        time.sleep(0.5)
    process.kill()
    process.communicate()
    rows = history(pieces(folder)[0])
    process = started(folder, proxy, 2, 7, "close", "run.seed=8")
    printed = process.communicate(timeout=240)[0].splitlines()
    assert process.returncode == 0, printed
    proxy.socket.close()
    last = records(pieces(folder)[1])
    return Played(folder, [rows, [r["history"] for r in last if r["type"] == "history"]], last, printed, proxy.asked)


def test_every_step_is_there_once(run: Played) -> None:
    assert [[row["step"]["num"] for row in rows] for rows in run.rows] == [[1, 2, 3, 4, 5], [6, 7]]
    for row in (row for rows in run.rows for row in rows):
        step, item = row["step"]["num"], row["item"]
        assert (item["reward/mean"], item["time/sync"], item["time/sync/plan"], item["a"]) == (step / 4, 1, 0.5, "NaN")
    ids = {piece.name.rpartition("-")[2] for piece in pieces(run.folder)}
    assert len(ids) == 1, "`wandb sync` puts the folders of one id together"


def test_the_user_is_told_where_it_is_and_what_is_left_out(run: Played) -> None:
    line = run.printed[0]
    assert line.startswith(
        f"tracker wandb writes to {run.folder}/wandb; upload it with: wandb sync {run.folder}/wandb/*-"
    )
    assert line.endswith("steps 3 to 5 are repeated now, and not written there again")
    assert run.printed[1:] == ["listening"], "no TCP port"


def test_settings_and_trajectories_are_kept(run: Played) -> None:
    [of_run] = [record["run"] for record in run.last if record["type"] == "run"]
    assert (of_run["project"], of_run["display_name"], of_run["tags"]) == ("proof", "first", ["cpu"])
    config = of_run["config"]["update"]
    assert (config["run"]["seed"], config["policy"]["optimizer"]["lr"]) == (8, 1e-6)
    assert config["environment"]["options"]["mine"]["api_key"] == "***"
    tables = [json.loads(file.read_text()) for file in run.folder.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert {"columns": COLUMNS, "data": [["1+1=", "7", 3.5, "done", "addition"]]} in tables and len(tables) == 7
    assert [record["exit"]["exit_code"] for record in run.last if record["type"] == "exit"] == [0]


def test_no_secret_leaves_and_nobody_is_asked(run: Played) -> None:
    """Searches all files for the secret, which is on the command line too, by default kept by the package."""
    files = [file for file in run.folder.parent.rglob("*") if file.is_file()]
    assert len(files) > 10
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert run.asked == []


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    return tmp_path


ONLINE = ("telemetry.trackers=[wandb]", "model.path=/does/not/exist", "data.train=[/neither.parquet]")


def test_online_without_a_key_is_refused_before_anything_is_read(no_key: Path) -> None:
    config = compose(None, ONLINE)
    with pytest.raises(UserError) as caught:
        check_inputs(config)
    assert str(caught.value) == (
        "telemetry.options.wandb.mode = online: there is no API key for wandb.example.org; set WANDB_API_KEY, run "
        "`wandb login`, or give telemetry.options.wandb.mode=offline, which keeps everything in the run's folder"
    )


def test_a_key_of_the_environment_or_of_wandb_login_will_do(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(None, ONLINE).telemetry
    (no_key / "netrc").write_text("machine wandb.example.org login user password anything\n")
    registry.check_ready(config)
    (no_key / "netrc").write_text("machine elsewhere.example.org login user password anything\n")
    with pytest.raises(UserError, match="no API key"):
        registry.check_ready(config)
    monkeypatch.setenv("WANDB_API_KEY", "anything")
    registry.check_ready(config)


def test_offline_needs_no_key(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.check_ready(compose(None, [*ONLINE, "telemetry.options.wandb.mode=offline"]).telemetry)
    monkeypatch.setenv("WANDB_MODE", "offline")
    registry.check_ready(compose(None, ONLINE).telemetry)


def test_the_package_is_missing(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'skyrl-mega\\[wandb\\]', or leave wandb out"):
        registry.check_ready(compose(None, ONLINE).telemetry)


def test_wrong_options_are_one_line() -> None:
    with pytest.raises(UserError, match=r"mode = of: allowed is one of online, offline or null"):
        registry.check(compose(None, ["telemetry.options.wandb.mode=of"]).telemetry)
