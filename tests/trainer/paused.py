"""An environment that stands still for as long as somebody wants: what an untrained model says is judged by parity."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.fault_env import ParityEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput

PAUSE, PAUSED = Path("pause"), Path("paused")
"""Below the folder that the run was started in: whoever makes the first waits for the second, and removes the first."""


class Paused(ParityEnv):
    """Waits while there is a file `pause`, having made the file `paused`."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges one answer."""
        while PAUSE.exists():
            PAUSED.touch()
            time.sleep(0.05)
        return super().step(action)
