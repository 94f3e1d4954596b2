"""Trajectories of an environment, run as in training, and the expected rewards."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.envs import registry, validate
from tests.fuzz.words import Pieces, said
from tests.support.machine import within

STEP_S = 2.0
"""Limit of this thread's CPU seconds for one step. Work of other processes is limited separately."""


def case_of(
    truth: Any,
    say: Sequence[Pieces],
    reward: float | None,
    low: float,
    high: float,
    *,
    turns: int = 1,
    options: Mapping[str, Any] | None = None,
    **row: Any,
) -> dict[str, Any]:
    """Returns a trajectory as a case.

    Args:
        truth: `reward_spec.ground_truth`.
        say: The policy's text of each turn.
        reward: Expected sum over all turns, known from the construction of the texts; None if unknown.
        low: Lowest possible reward.
        high: Highest possible reward.
        turns: `rollout.max_turns`.
        options: Options of the environment.
        row: Further columns.
    """
    extras = {"reward_spec": {"ground_truth": truth}, **row}
    return {"row": extras, "turns": turns, "options": options or {}, "say": say, "reward": reward, "range": [low, high]}


def play(name: str, case: Mapping[str, Any], retriever: RetrieverConfig | None = None) -> None:
    """Plays a trajectory to the end, or to the end of the texts.

    Raises:
        AssertionError: The reward is wrong, or a step took too long.
    """
    config = EnvironmentConfig(options={name: case["options"]}, retriever=retriever or RetrieverConfig())
    registry.check(config)
    env = registry.make(name, case["row"], config, case["turns"])
    total, done = 0.0, False
    try:
        validate.init(env, [{"role": "user", "content": "x"}])
        for pieces in case["say"]:
            start = time.thread_time()
            output = validate.step(env, said(pieces))
            took = time.thread_time() - start
            assert within(took, STEP_S), f"a step took {took:.1f} s of CPU time"
            total, done = total + output.reward, output.done
            if done:
                break
            assert output.observations, "it goes on and says nothing"
    finally:
        env.close()
    low, high = case["range"]
    assert low <= total <= high, f"earned {total}; allowed is {low} to {high}"
    if case["reward"] is not None:
        assert done, "it is not done"
        assert math.isclose(total, case["reward"], abs_tol=1e-9), f"earned {total} and not {case['reward']}"
