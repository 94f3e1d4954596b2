"""An environment with random-looking rewards and lengths, even for an untrained model: a checksum of the answer
decides."""

from __future__ import annotations

import random
import time
from zlib import crc32

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput

LONGEST_S = 0.1
STOP = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Stop strings that end a turn early: an untrained model seldom writes an end token, and a truncated turn ends the
trajectory."""


class Chance(BaseTextEnv):
    """Rewards answers with an odd checksum; ends in a quarter of the turns or after the last turn. Each turn takes a
    random time."""

    requires_ground_truth = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        time.sleep(LONGEST_S * random.SystemRandom().random())
        checksum = crc32(action.encode())
        done = checksum % 4 == 0 or self.turns == self.max_turns
        answer = [] if done else [{"role": "user", "content": f"{checksum % 1000}"}]
        return BaseTextEnvStepOutput(observations=answer, reward=float(checksum % 2), done=done, metadata={})
