"""Addition with a gate: a test can block the environment in the middle of an RL step."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import skyrl_mega
from skyrl_mega.envs.addition.env import AdditionEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option, text

_answers = itertools.count()
"""Answers judged in this process."""


class GateEnv(AdditionEnv):
    """An environment that waits before the first answer after the number in the file `closed_after`, until the number
    changes or the file is removed.

    During the wait, the folder contains a file `waiting`. The file `driver` names the source of the code and the
    shipped files.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {"folder": text(None, "where that file is")}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        folder, number = Path(self.env_config["folder"]), next(_answers)
        (folder / "driver").write_text(f"{skyrl_mega.__file__} {os.environ.get('SKYRL_MEGA_TEST')}")
        while self._closed(folder, number):
            (folder / "waiting").touch()
            time.sleep(0.1)
        output = super().step(action)
        output["reward"] = float(sum(map(ord, action)) % 2)  # untrained answers are all wrong: no signal to learn from
        return output

    def _closed(self, folder: Path, number: int) -> bool:
        try:
            return number >= int((folder / "closed_after").read_text())
        except FileNotFoundError:
            return False
