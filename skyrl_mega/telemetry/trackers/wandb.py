"""Tracker for Weights & Biases: a run of a project, online or kept in the run's folder for a later upload.

A resumed run continues the run with the same id; stored steps are not logged again (sent_steps.py). Offline, each start
of the run creates a folder `wandb/offline-run-*-<id>`, and `wandb sync` joins them.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal
from urllib.parse import urlsplit

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import Rule
from skyrl_mega.config.options import Option, text, texts
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.sent_steps import SentSteps

PROJECT = "skyrl_mega"
FLUSH_S = 0.2
"""Seconds between writes to the run's folder: a kill loses younger data, and wandb's default of 15 s is many steps."""
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbTracker:
    """Logs to a run of Weights & Biases."""

    OPTIONS: Mapping[str, Option] = {
        "mode": Option(
            None, Rule(str, nullable=True, choices=("online", "offline")), "null is WANDB_MODE's, else online"
        ),
        "project": text(None, f"null is WANDB_PROJECT's, else {PROJECT}"),
        "entity": text(None, "user or team; null is WANDB_ENTITY's, else the key's own"),
        "name": text(None, "null is run.name"),
        "group": text(None, "runs that are shown together"),
        "tags": texts([], "words to find the run by"),
    }

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks for the package and, online, for an API key.

        Raises:
            UserError: The package or the key is missing.
        """
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "telemetry.trackers names wandb, and the package wandb is not installed",
                fix="install it with pip install 'skyrl-mega[wandb]', or leave wandb out",
            )
        if _mode(options) == "online" and not any(os.environ.get(name) for name in KEYS):
            _check_netrc(os.environ.get("WANDB_BASE_URL") or _configured_server())

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder, self._options = folder.absolute(), options
        self._sent = SentSteps(folder / "trackers" / "wandb.json")
        self._trajectories: dict[int, Sequence[TrajectoryText]] = {}
        self._run: Any = None

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> str:
        """Creates a wandb run, or continues the run of the resumed checkpoint (`resumed_step`, None: from the
        beginning); returns a line with its address, or offline with the command that uploads it. Errors of wandb
        pass through. Raises ValueError or KeyError for a damaged file of sent steps, and OSError if the file cannot be
        read or written."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # error reports for wandb's authors
        os.environ.setdefault("WANDB_SILENT", "true")  # only `Console` prints on the terminal
        # default: tables are staged in the home folder
        os.environ.setdefault("WANDB_DATA_DIR", str(self._folder / "wandb"))
        import wandb

        options, mode = self._options, _mode(self._options)
        known_run = self._sent.resume(resumed_step)
        run_id = known_run or token_hex(4)
        self._run = wandb.init(
            dir=str(self._folder),
            id=run_id,
            resume="allow" if known_run else None,
            reinit="create_new",
            mode=mode,
            project=options["project"] or os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=options["entity"],
            name=options["name"] or config["run"]["name"],
            group=options["group"],
            tags=list(options["tags"]),
            config=dict(config),
            allow_val_change=True,
            # Do not record output or command line, which may contain secrets.
            settings=wandb.Settings(
                silent=True, console="off", x_disable_meta=True, x_transaction_log_flush_interval=FLUSH_S
            ),
        )
        if not known_run:
            self._sent.begin(run_id)
        if mode == "online":
            place = f"writes to {self._run.url}"
        else:
            place = f"writes to {self._folder}/wandb; upload it with: wandb sync {self._folder}/wandb/*-{run_id}"
        return place + self._sent.skipped_text(resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a row of the history, with the step's trajectories as a table; skips a step already sent. Errors of
        wandb pass through; the step may then be sent again."""
        import wandb

        row: dict[str, Any] = dict(metrics)
        if trajectories := self._trajectories.get(step):
            columns = [field.name for field in fields(TrajectoryText)]
            row["trajectories"] = wandb.Table(columns=columns, data=[list(astuple(t)) for t in trajectories])
        self._sent.send_once(step, lambda: self._run.log(row, step=step, commit=True))
        self._trajectories.pop(step, None)  # only now: a failed call is retried with the same trajectories

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryText]) -> None:
        """Keeps the trajectories until `log` sends the row of the same step; forgets all trajectories kept before, also
        those of the same step."""
        self._trajectories = {step: trajectories}

    def close(self, failed: bool = False) -> None:
        """Ends the wandb run, with exit code 1 if `failed`; a resume continues it. Does nothing if `start` created
        none. Errors of wandb pass through."""
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)


def _mode(options: Mapping[str, Any]) -> Literal["online", "offline"]:
    return "offline" if (options["mode"] or os.environ.get("WANDB_MODE")) == "offline" else "online"


def _configured_server() -> str:
    """Returns the server saved by `wandb login --host`."""
    import wandb

    return str(wandb.setup().settings.base_url)


def _check_netrc(server: str) -> None:
    """Checks the netrc file, where `wandb login` saves keys.

    Raises:
        UserError: There is no key for this server.
    """
    host = urlsplit(server).netloc
    try:
        key = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host)
    except (OSError, netrc.NetrcParseError):
        key = None
    if not key:
        raise UserError(
            f"there is no API key for {host}",
            key="telemetry.options.wandb.mode",
            value="online",
            fix="set WANDB_API_KEY, run `wandb login`, or give telemetry.options.wandb.mode=offline, "
            "which keeps everything in the run's folder",
        )
