"""Code generation, judged by tests in the manner of LiveCodeBench (arXiv:2403.07974)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.lcb.judge import cases, code_of, run_tests
from skyrl_mega.envs.options import Option, choice, group, number, whole
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox
from skyrl_mega.envs.sandbox.run import settings

BOX = "environment.options.lcb.sandbox"
"""Setting of the sandbox."""
LIMITS = CommandLimits(wall_s=12, cpu_s=6, output_kib=4096)


class LcbEnv(BaseTextEnv):
    """Code generation in one turn. The last fenced block of the answer is the program; `reward_spec.ground_truth` holds
    the tests.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "reward": choice("all", "share", doc="all: 1 when every test passes, else 0; share: of the tests that pass"),
        "max_tests": whole(0, "the first ones only; 0 runs all", low=0),
        "timeout_s": number(45.0, "for all tests together, below rollout.env_timeout_s", above=0, high=86400),
        "sandbox": group(settings(LIMITS), "limits of one test"),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.box = Sandbox.from_options(self.options["sandbox"], BOX, LIMITS)
        self.cases = cases(self.ground_truth)

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError if this machine cannot confine a program as set in the options of the sandbox, and
        InfrastructureFault if the sandbox does not start."""
        Sandbox.from_options(options["sandbox"], BOX).check(BOX)

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a list of at least one test, or JSON of one; else the reason."""
        try:
            cases(truth)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"{error.args[0]} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            return f"{problem}; allowed is a list of tests, or JSON of one, each with input, output and testtype"
        return None

    @classmethod
    def longest_step_s(cls, options: Mapping[str, Any]) -> float:
        """Returns the option `timeout_s`, the time limit of all tests together, in seconds."""
        return float(options["timeout_s"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Runs the program in the last fenced block of the answer on the tests, and ends the trajectory.

        The reward is 1 if every test passes, else 0; with the option `reward=share`, the share of the tests that pass.
        An answer without a fenced block gets 0. With the option `max_tests`, only that many tests count, the first.
        `metadata` has `parsed_code` (None without a block) and `verdicts`, the results of the tests up to the first
        that fails; with `reward=share`, of all tests.

        Raises:
            InfrastructureFault: The sandbox cannot start a program.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        code = code_of(action)
        tests = self.cases[: self.options["max_tests"] or None]
        share = self.options["reward"] == "share"
        verdicts = (
            run_tests(code, tests, self.box, seconds=float(self.options["timeout_s"]), stop=not share)
            if code is not None
            else []
        )
        passes = verdicts.count("ok")
        reward = passes / len(tests) if share else float(passes == len(tests))
        return BaseTextEnvStepOutput(
            observations=[], reward=reward, done=True, metadata={"parsed_code": code, "verdicts": verdicts}
        )
