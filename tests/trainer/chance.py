"""An environment whose rewards and lengths an untrained model cannot help to vary: a checksum of what it says."""

from __future__ import annotations

import random
import time
from zlib import crc32

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput

LONGEST_S = 0.1
STOP = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Strings at which a turn ends: an untrained model seldom ends one by itself, and one that is cut ends everything."""


class Chance(BaseTextEnv):
    """Earns an even checksum; ends at one in four turns, or when the turns are used up. How long it takes is chance."""

    requires_ground_truth = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        time.sleep(LONGEST_S * random.SystemRandom().random())
        found = crc32(action.encode())
        done = found % 4 == 0 or self.turns == self.max_turns
        answer = [] if done else [{"role": "user", "content": f"{found % 1000}"}]
        return BaseTextEnvStepOutput(observations=answer, reward=float(found % 2), done=done, metadata={})
