"""MLflow with the real package and a store in the run's folder, read by MLflow's own client."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli.inputs import check_inputs
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.trackers import registry
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.mlflow import MlflowTracker, allowed_name
from skyrl_mega.telemetry.trackers.trackers import open_trackers
from tests.telemetry.network import Proxy, listening

SECRET = "sk-" + "abcdefghij" * 4
SETTINGS = (
    "run.name=first",
    "run.seed=7",
    "telemetry.trackers=[mlflow]",
    "telemetry.options.mlflow.experiment=proof",
    f"environment.options.mine.api_key={SECRET}",
)
ODD = {"eval/gsm8k (en)/mean": "eval/gsm8k _en_/mean", "../a": "__/a", "b//c": "b/_/c", "/d": "_/d", "100%": "100_"}
"""Names rejected by MLflow, and the replacements."""


class Store:
    """The store of a run's folder, and a run logging to the store."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        self.folder, self.proxy, self.lines = folder, proxy, list[str]()
        self.tracker: MlflowTracker

    def start(self, resumed: int | None, *settings: str) -> None:
        """Starts a process of the run: settings and masking as in a run, calls made individually by the test."""
        config = compose(None, [*SETTINGS, *settings])
        cls, options = registry.check(config.telemetry)["mlflow"]
        self.tracker = cls(self.folder, options)
        self.lines.append(self.tracker.start(masked_settings(config), resumed))

    def log(self, first: int, last: int, **more: float) -> None:
        for step in range(first, last + 1):
            self.tracker.log_trajectories(step, [TrajectoryText("1+1=", f"{step}", step / 2, "done", "addition")])
            self.tracker.log(step, {"reward/mean": step / 4, "time/sync": 1.0, "time/sync/plan": 0.5, **more})

    @property
    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{self.folder}/mlflow/mlflow.db")

    @property
    def runs(self) -> list[Any]:
        """All runs of the experiment, the oldest first."""
        experiment = self.client.get_experiment_by_name("proof")
        return list(reversed(self.client.search_runs([experiment.experiment_id])))

    def history(self, run: Any, name: str) -> list[tuple[int, float]]:
        return sorted((m.step, m.value) for m in self.client.get_metric_history(run.info.run_id, name))


def masked_settings(config: Config) -> Mapping[str, Any]:
    """Returns the settings passed to a tracker."""
    from dataclasses import asdict

    from skyrl_mega.common.secrets import masked

    return dict(masked(asdict(config)))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Yields the store of a run killed after step 5, resumed after step 2 with another setting, up to step 7."""
    proxy = Proxy()
    proxy.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        opened = Store(tmp_path_factory.mktemp("mlflow") / "first", proxy)
        opened.start(None)
        opened.log(0, 5)
        opened.start(2, "run.seed=8")
        opened.log(3, 7)
        opened.tracker.close()
        yield opened
    proxy.socket.close()


def test_every_step_is_there_once(store: Store) -> None:
    run = store.runs[0]
    assert store.history(run, "reward/mean") == [(step, step / 4) for step in range(8)]
    assert store.history(run, "time/sync") == [(step, 1.0) for step in range(8)], "a name, and the start of another"
    assert store.history(run, "time/sync/plan") == [(step, 0.5) for step in range(8)]
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")


def test_the_user_is_told_where_it_is_and_what_is_left_out(store: Store) -> None:
    place = f"writes run {store.runs[0].info.run_id} to sqlite:///{store.folder}/mlflow/mlflow.db"
    assert store.lines[:2] == [place, f"{place}; steps 3 to 5 are repeated now, and not written there again"]


def test_settings_and_trajectories_are_kept(store: Store) -> None:
    run = store.runs[0]
    assert (run.data.params["run.seed"], run.data.params["policy.optimizer.lr"]) == ("7", "1e-06")
    artifacts = store.folder / "mlflow" / "artifacts" / run.info.run_id / "artifacts"
    config = json.loads((artifacts / "config.json").read_text())
    assert (config["run"]["seed"], config["environment"]["options"]["mine"]["api_key"]) == (8, "***")
    assert len(list(artifacts.glob("trajectories/*.json"))) == 8
    assert json.loads((artifacts / "trajectories" / "step_000007.json").read_text()) == {
        "trajectories": [
            {"prompt": "1+1=", "response": "7", "reward": 3.5, "status": "done", "environment": "addition"}
        ]
    }


def test_no_secret_leaves_nobody_is_asked_and_nothing_listens(store: Store) -> None:
    files = [file for file in store.folder.rglob("*") if file.is_file()]
    assert len(files) > 8
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert store.proxy.asked == []
    assert set(listening(os.getpid())) <= {"127.0.0.1", "::1"}


def test_a_run_from_its_beginning_is_a_new_one(store: Store) -> None:
    before = len(store.runs)
    store.start(None)
    store.log(1, 2, a=math.nan, b=math.inf, **dict.fromkeys(ODD, 0.5))
    store.tracker.close(failed=True)
    assert len(store.runs) == before + 1
    run = store.runs[-1]
    assert run.info.status == "FAILED"
    assert store.history(run, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert math.isnan(store.history(run, "a")[0][1]) and store.history(run, "b")[0][1] > 1e300
    assert {name: store.history(run, name)[0] for name in ODD.values()} == dict.fromkeys(ODD.values(), (1, 0.5))


def test_a_call_whose_answer_is_lost_is_not_there_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.start(None)
    log_batch, calls = store.tracker._client.log_batch, list[int]()

    def lost(*arguments: Any, **named: Any) -> None:
        log_batch(*arguments, **named)
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("the server has taken it, and its answer does not come")

    monkeypatch.setattr(store.tracker._client, "log_batch", lost)
    with pytest.raises(ConnectionError):
        store.log(1, 1)
    store.log(1, 2)  # repeated, as by guarded.py
    store.tracker.close()
    assert store.history(store.runs[-1], "reward/mean") == [(1, 0.25), (2, 0.5)] and len(calls) == 3


def test_it_works_as_one_of_a_runs_trackers(store: Store) -> None:
    config = compose(None, [*SETTINGS, f"telemetry.options.mlflow.uri=sqlite:///{store.folder}/mlflow/mlflow.db"])
    folder, messages = store.folder.parent / "second", list[str]()
    with open_trackers(config, folder, messages.append) as trackers:
        trackers.start(config, None)
        trackers.log(1, {"reward/mean": 0.5})
    assert len(messages) == 1, messages
    assert store.history(store.runs[-1], "reward/mean") == [(1, 0.5)]


def test_metrics_go_on_where_files_cannot_be_stored(store: Store) -> None:
    """Blocks the experiment's artifacts: a file is in place of the folder until removed by the test."""
    folder, messages = store.folder.parent / "third", list[str]()
    artifacts = folder / "mlflow" / "artifacts"
    artifacts.parent.mkdir(parents=True)
    artifacts.write_text("in the way")
    config, rows = compose(None, [*SETTINGS]), [TrajectoryText("1+1=", "2", 1.0, "done", "addition")]
    with open_trackers(config, folder, messages.append) as trackers:
        trackers.start(config, None)
        for step in (1, 2):
            trackers.log_trajectories(step, rows)
            trackers.log(step, {"reward/mean": step / 4})
    third = Store(folder, store.proxy)
    run = third.runs[0]
    assert third.history(run, "reward/mean") == [(1, 0.25), (2, 0.5)] and run.info.status == "FINISHED"
    assert len(messages) == 1, messages
    assert "; cannot store config.json: " in messages[0] and "metrics are still logged" in messages[0]

    artifacts.unlink()
    third.start(2)
    third.log(3, 3)
    assert third.history(run, "reward/mean")[-1] == (3, 0.75)
    assert (artifacts / run.info.run_id / "artifacts" / "trajectories" / "step_000003.json").is_file()


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (
            "uri=runs/mlruns",
            ["telemetry.options.mlflow.uri = runs/mlruns", "sqlite:////home/me/mlflow.db", "null keeps"],
        ),
        ("uri=file:///runs/mlruns", ["file:///runs/mlruns", "folders of files"]),
        ("uri=ftp://me:secret@host/x", ["ftp://***@host/x"]),
        ("uri=databricks", ["DATABRICKS_HOST", "DATABRICKS_TOKEN"]),
        ("experimnt=a", ["telemetry.options.mlflow.experimnt", "did you mean experiment?"]),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_is_read(
    given: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "nothing"))
    monkeypatch.delenv("DATABRICKS_TOKEN", raising=False)
    config = compose(
        None, ["telemetry.trackers=[mlflow]", f"telemetry.options.mlflow.{given}", "model.path=/does/not/exist"]
    )
    with pytest.raises(UserError) as caught:
        check_inputs(config)
    line = str(caught.value)
    assert [part for part in parts if part not in line] == [] and "\n" not in line, line


def test_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(None, ["telemetry.trackers=[mlflow]"]).telemetry
    for missing, needed in ((("mlflow",), "mlflow is"), (("sqlalchemy", "alembic"), "sqlalchemy, alembic is")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, gone=missing: None if name in gone else name)
        with pytest.raises(UserError, match=rf"{needed} not installed; install it with pip install 'skyrl-mega\[mlf"):
            registry.check_ready(config)


def test_names_are_mapped_the_same_way_every_time() -> None:
    assert {name: allowed_name(name) for name in ODD} == ODD
    for name in ("reward/mean", "time/sync", "time/sync/plan", "eval/openai/gsm8k/pass_at_4", "a b:c-d.e"):
        assert allowed_name(name) == name
    assert allowed_name("x" * 300) == "x" * 250
