"""Tracker for MLflow: a run of an experiment, in an SQLite file of the run's folder or on a server.

A resumed run continues the same MLflow run. MLflow cannot delete steps, so stored steps are not logged again
(sent_steps.py). Names keep their slashes: in a database `time/sync` and `time/sync/plan` are different metrics.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import leaves, masked
from skyrl_mega.common.values import shown
from skyrl_mega.config.options import Option, text
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.guarded import one_line
from skyrl_mega.telemetry.trackers.sent_steps import SentSteps

EXPERIMENT = "skyrl_mega"
SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
"""Supported stores; a driver is given as in mysql+pymysql. MLflow no longer supports plain-file stores."""
PARAMETERS = 100
"""MLflow's limit of parameters per call; the limit for metrics, 1,000, is never reached by a step."""
LONGEST_NAME = 250
LONGEST_VALUE = 6000


class MlflowTracker:
    """Logs to an MLflow run: metrics, settings (as parameters and config.json), and trajectories as files.

    Files go to the experiment's artifact store, which may differ from the metric store. If a file cannot be stored,
    this is reported once and metrics are still logged.
    """

    OPTIONS: Mapping[str, Option] = {
        "uri": text(None, "the store; null is MLFLOW_TRACKING_URI's, else mlflow/mlflow.db in the run's folder"),
        "experiment": text(None, f"null is MLFLOW_EXPERIMENT_NAME's, else {EXPERIMENT}"),
        "name": text(None, "null is run.name"),
    }

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks the packages and the address of the store.

        Raises:
            UserError: A package or the token for Databricks is missing, or MLflow does not support the store.
        """
        uri = options["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        scheme = "databricks" if uri == "databricks" else urlsplit(uri).scheme.partition("+")[0]
        if scheme not in SCHEMES:
            raise UserError(
                "allowed is a database such as sqlite:////home/me/mlflow.db (MLflow has ended "
                "its support for folders of files) or a server's http://host:port; null keeps "
                "everything in the run's folder",
                key="telemetry.options.mlflow.uri",
                value=shown(masked(uri)),
            )
        needed = ["mlflow"] if scheme in ("http", "https", "databricks") else ["mlflow", "sqlalchemy", "alembic"]
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            raise UserError(
                f"telemetry.trackers names mlflow, and {', '.join(missing)} is not installed",
                fix="install it with pip install 'skyrl-mega[mlflow]', or leave mlflow out",
            )
        if scheme == "databricks" and not _has_databricks_key():
            raise UserError(
                "there is no token for Databricks; set DATABRICKS_HOST and DATABRICKS_TOKEN, or "
                "run `databricks auth login`",
                key="telemetry.options.mlflow.uri",
                value=uri,
            )

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder, self._options = folder.absolute() / "mlflow", options
        self._sent = SentSteps(folder / "trackers" / "mlflow.json")
        self._times: dict[int, int] = {}
        self._client: Any = None
        self._run_id = ""
        self._failure_reported = False
        """True after a failed attempt to store a file was reported."""

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> str:
        """Creates an MLflow run, or continues the run of the resumed checkpoint (`resumed_step`, None: from the
        beginning); returns a line with id and store. Errors of MLflow pass through. A repeated call continues the
        same run. Raises ValueError or KeyError for a damaged file of sent steps, and OSError if the file cannot be read
        or written."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # usage statistics for MLflow's authors
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow.tracking import MlflowClient

        uri = self._options["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{self._folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        known_run = self._sent.resume(resumed_step)
        self._run_id = known_run or self._create(config, uri)
        if not known_run:  # record at once: if a later call fails, the retry continues this run
            self._sent.begin(self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        trouble = self._store(dict(config), "config.json")  # settings of a resumed run may differ
        line = f"writes run {self._run_id} to {masked(uri)}" + self._sent.skipped_text(resumed_step)
        return f"{line}; {trouble}" if trouble else line

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends all metrics of a step in one call, which the store accepts or rejects as a whole.

        Skips a step already sent, such as a step repeated after a resume. Errors of MLflow pass through; the step may
        then be sent again.
        """
        from mlflow.entities import Metric

        # A retry keeps its timestamp, so the store recognises duplicates.
        now = self._times.setdefault(step, int(time.time() * 1000))
        batch = [Metric(allowed_name(name), value, now, step) for name, value in metrics.items()]
        self._sent.send_once(step, lambda: self._client.log_batch(self._run_id, metrics=batch))
        self._times.clear()

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> str | None:
        """Stores the trajectories as an artifact file; a repeated step overwrites its file.

        Never raises for a failed upload: returns a line for the user on the first failure, otherwise None.
        """
        rows = {"trajectories": [asdict(t) for t in trajectories]}
        return self._store(rows, f"trajectories/step_{step:06d}.json")

    def close(self, failed: bool = False) -> None:
        """Sets the run's status to FAILED or FINISHED; a resume sets RUNNING again. Does nothing if `start` found or
        made no run. Errors of MLflow pass through."""
        if self._run_id:
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _store(self, content: dict[str, Any], file: str) -> str | None:
        """Stores an artifact file of the run. Returns a line for the user on the first failure."""
        try:
            self._client.log_dict(self._run_id, content, file)
        except Exception as error:  # each storage raises different errors
            if not self._failure_reported:
                self._failure_reported = True
                return f"cannot store {file}: {one_line(error)}; metrics are still logged, and later files still tried"
        return None

    def _create(self, config: Mapping[str, Any], uri: str) -> str:
        from mlflow.entities import Param

        name = self._options["experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name, _artifact_folder(uri))
        run = self._client.create_run(experiment, run_name=self._options["name"] or config["run"]["name"])
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in leaves(config)}
        parameters = [Param(allowed_name(key), value[:LONGEST_VALUE]) for key, value in values.items()]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(run.info.run_id, params=parameters[first : first + PARAMETERS])
        return str(run.info.run_id)


def allowed_name(name: str) -> str:
    """Returns a name allowed by MLflow: other characters become `_`, as do empty parts and parts of dots alone. Cut to
    `LONGEST_NAME` characters."""
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in name.split("/"))
    return "/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)[:LONGEST_NAME]


def _artifact_folder(uri: str) -> str | None:
    """Returns the artifact folder next to an SQLite file; None for other stores, which decide themselves."""
    file = uri.removeprefix("sqlite:///")
    return str(Path(file).absolute().parent / "artifacts") if file != uri else None


def _has_databricks_key() -> bool:
    if os.environ.get("DATABRICKS_TOKEN") or os.environ.get("DATABRICKS_CLIENT_SECRET"):
        return True
    return Path(os.environ.get("DATABRICKS_CONFIG_FILE") or "~/.databrickscfg").expanduser().is_file()
