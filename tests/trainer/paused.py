"""The parity environment with a pause on request."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.fault_env import ParityEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput

PAUSE, PAUSED = Path("pause"), Path("paused")
"""Files below the working directory of the run: a test makes `pause`, waits for `paused`, and removes `pause` to
continue."""


class Paused(ParityEnv):
    """The parity environment, waiting while the file `pause` exists, after making the file `paused`."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Waits while the run is paused, then judges the answer."""
        while PAUSE.exists():
            PAUSED.touch()
            time.sleep(0.05)
        return super().step(action)
