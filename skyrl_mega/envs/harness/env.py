"""Any program as an agent: reads a task, calls the policy by the SDK of an API, and writes an answer."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry
from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv, AgentStopped
from skyrl_mega.envs.base import BaseTextEnvStepOutput, Message
from skyrl_mega.envs.harness import places
from skyrl_mega.envs.harness.container_program import words_with_scripts
from skyrl_mega.envs.harness.judge import AnswerJudge
from skyrl_mega.envs.harness.places import KEY, LIMITS, TaskContainer
from skyrl_mega.envs.harness.program import TASK, check_variables, split, task_text, words_of
from skyrl_mega.envs.options import Option, choice, group, mapping, number, switch, text, texts
from skyrl_mega.envs.sandbox import SandboxResult
from skyrl_mega.envs.sandbox.run import GRACE_S, settings
from skyrl_mega.envs.swe.task import TEST_LISTS
from skyrl_mega.envs.truths import SPECS

HIDDEN = ["answer", "solution", "extra_info.answer", "extra_info.solution", *(f"extra_info.{n}" for n in TEST_LISTS)]
"""Usual columns of right answers beside the ground truth, and names of a software task's tests."""
SHOWN = 2000
"""Characters kept of the end of each output, for people."""


class ProgramFailed(AgentStopped):
    """The program ended with an exit code other than 0, by a signal, or for memory."""


class HarnessEnv(AgentEnv):
    """A user's program, started once per trajectory with address and key of the policy's endpoint in environment
    variables and the task in a file. A function in this process judges the answer, after the end of the program.
    """

    requires_ground_truth: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "command": text(None, "the program and its arguments, in one text, as for a shell; no shell runs"),
        "reward": text(None, "what judges the answer: a function's import path, or an environment of one turn"),
        "reward_options": mapping("further arguments of the function, or options of the environment"),
        "timeout_s": number(600.0, "for the program; judging comes after", above=0, high=86400),
        "failed_exit": choice("error", "judge", doc="an exit code other than 0: a failed trajectory, or judged"),
        "variables": mapping("further environment variables; null copies the run's own"),
        "hidden": texts(HIDDEN, "columns left out of the task's file, besides the ground truth"),
        "read": texts([], "further files and folders that the program may read in the sandbox"),
        "confined": switch(True, "in the sandbox, where it reaches the endpoint only; false: as a process of yours"),
        "container": text(None, "instead of the sandbox a container, by podman or docker"),
        "image": text(None, "image of the container, unless the row's extra_info.image names one"),
        "container_options": mapping("options of the container's runtime"),
        "sandbox": group(
            {name: option for name, option in settings(LIMITS).items() if name != "wall_s"}, "limits of the program"
        ),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.judge = _judge(self.options)
        self.place = places.place_of(self.options, self.judge, self.extras)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError for a command with an open quotation, a reward function that cannot be imported or called,
        an unknown or wrong option of the judge, a variable without text, an unknown container runtime or a wrong option
        of the runtime, containers that cannot reach the policy, or `container` beside a software task."""
        if options["command"] is not None:
            split(options["command"], f"{KEY}.command")
        if options["reward"] is not None:
            places.check_options(options, _judge(options))
        check_variables(options["variables"], f"{KEY}.variables")

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks program, variables, and the sandbox or the container runtime on this machine.

        Raises:
            UserError: `command` or `reward` is missing, the program does not exist, a variable is not set, the machine
                lacks a confinement or the runtime, or the judge's own `check_ready` refuses.
            InfrastructureFault: The sandbox, or the client of the containers, does not start.
        """
        judge = _judge(options)
        judge.cls.check_ready(judge.options)
        places.check_ready(options, judge)

    @classmethod
    def try_machine(cls, options: Mapping[str, Any]) -> None:
        """Tries what the judge starts on this machine (`try_machine` of its environment); starts no program.

        Raises:
            UserError: The start fails, or `reward` is missing or no judge.
            Exception: The `try_machine` of the judge raised it, such as InfrastructureFault.
        """
        judge = _judge(options)
        judge.cls.try_machine(judge.options)

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason for refusing a row, such as the judge's or a missing image; None for an accepted row, and
        without `reward`. Raises UserError if the judge cannot be imported, or one of its options is wrong."""
        if options["reward"] is None:
            return None
        if options["container"] is not None and places.image_of(options, row) is None:
            return f"column extra_info.image is missing; give the rows an image, or set {KEY}.image"
        if options["container"] is not None and (wrong := places.wrong_image(options, row)):
            return wrong
        judge = _judge(options)
        return judge.cls.wrong_row(row, judge.options)

    @classmethod
    def longest_step_s(cls, options: Mapping[str, Any]) -> float:
        """Returns the longest duration of the judging in seconds, under the judge's own limits; 0 without `reward`.
        Raises UserError if the judge cannot be imported, or one of its options is wrong."""
        if options["reward"] is None:
            return 0.0
        judge = _judge(options)
        return judge.cls.longest_step_s(judge.options)

    @classmethod
    def longest_run_s(cls, options: Mapping[str, Any]) -> float:
        """Returns the longest duration of the program in seconds: the option `timeout_s` plus the time for ending the
        program. `options` has all options, with defaults filled in."""
        return float(options["timeout_s"]) + GRACE_S

    @classmethod
    def with_absolute_paths(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a copy of the options with absolute paths of the files in `command`, `read` and `reward`, and in the
        options of a built-in judge.

        Raises:
            UserError: The command has an open quotation or no word.
        """
        changed = dict(options)
        if options.get("command"):
            words = words_with_scripts if places.in_container(options) else words_of
            changed["command"] = shlex.join(words(options["command"], f"{KEY}.command"))
        if options.get("reward"):
            changed["reward"] = imports.absolute(options["reward"])
        if options.get("reward") in registry.BUILT_IN:
            judge = registry.resolve(options["reward"], EnvironmentConfig())
            changed["reward_options"] = judge.with_absolute_paths(options.get("reward_options") or {})
        if options.get("read"):
            changed["read"] = [os.path.abspath(path) for path in options["read"]]
        return changed

    def prepare(self) -> None:
        """Opens the program's place: creates the working folder, or starts the container.

        Raises:
            UserError: The image does not exist, or a file of a software task cannot be used.
            InfrastructureFault: The container does not start.
        """
        self.place.open()

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Runs the program and judges the answer: the file `answer.txt`, or the standard output without this file.
        After a limit of time, output or disk, the work so far is judged. A software task is judged by its tests
        instead. Closes the program's place.

        Args:
            endpoint: Address and key of the policy, given to the program.
            prompt: The row's messages, written into the program's task file.

        Returns:
            The judge's reward; no observations and `done` True. `metadata` has the judge's notes, in `metrics` also
            `program_s` and `program_cut` (1 after an end by a limit), and `program` with `status`, `exit`, `seconds`,
            and the ends of `stdout` and `stderr`.

        Raises:
            ProgramFailed: The program failed or was ended for memory, and the option `failed_exit` is `error`.
            BadOutput: The judge gave no reward, or asks for another turn.
            UserError: The image does not exist, the machine lacks isolation that the sandbox requires, or a file of a
                software task cannot be used, such as its test patch.
            InfrastructureFault: The program or container cannot be started, or the container is gone.
            Exception: The judge raised it.
        """
        self.place.open()
        try:
            columns = visible_columns(self.extras, self.options["hidden"])
            result = self.place.run(endpoint, {TASK: task_text(prompt, columns)})
            if result.status in ("failed", "memory") and self.options["failed_exit"] == "error":
                raise ProgramFailed(_failure(result), {"program": _noted(result)})
            judged = self._judged(result, prompt)
        finally:
            self.place.close()
        notes = dict(judged["metadata"])
        notes["metrics"] = {
            **notes.get("metrics", {}),
            "program_s": result.seconds,
            "program_cut": float(result.status not in ("ok", "failed")),
        }
        notes["program"] = _noted(result)
        return BaseTextEnvStepOutput(observations=[], reward=judged["reward"], done=True, metadata=notes)

    def _judged(self, result: SandboxResult, prompt: list[Message]) -> BaseTextEnvStepOutput:
        if isinstance(self.place, TaskContainer):
            return self.place.verdict()
        written = self.place.answer(int(self.options["sandbox"]["output_kib"]) * 1024)
        answer = result.stdout if written is None else written
        about = {"folder": self.place.folder, "status": result.status, "exit": result.exit}
        return self.judge.verdict(_with_program(self.extras, about), prompt, answer)

    def close(self) -> None:
        """Removes the program's place: working folder or container. May be called again."""
        self.place.close()


def _judge(options: Mapping[str, Any]) -> AnswerJudge:
    """Returns the judge of the options.

    Raises:
        UserError: `reward` is missing, or no judge.
    """
    if options["reward"] is None:
        raise UserError(
            "it is not set; allowed is package.module:function, path/to/file.py:function, an environment of one turn "
            "such as math, or swe",
            key=f"{KEY}.reward",
        )
    return AnswerJudge.of(options["reward"], options["reward_options"], f"{KEY}.reward")


def _noted(result: SandboxResult) -> dict[str, Any]:
    """Returns the facts about a program kept with the trajectory."""
    outputs = {"stdout": result.stdout[-SHOWN:], "stderr": result.stderr[-SHOWN:]}
    return {"status": result.status, "exit": result.exit, "seconds": result.seconds, **outputs}


def visible_columns(extras: Mapping[str, Any], hidden: list[str]) -> dict[str, Any]:
    """Returns a copy of a row's columns for the program: all but the ground truth and hidden columns.

    Args:
        extras: The row's columns.
        hidden: Names of columns, or of entries of columns (`extra_info.answer`); missing names are no error.
    """
    columns = copy.deepcopy({name: value for name, value in extras.items() if name not in SPECS})
    for name in hidden:
        *outer, last = name.split(".")
        place: Any = columns
        for part in outer:
            place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
    return columns


def _with_program(extras: Mapping[str, Any], about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the row's columns with the result of the program as `extra_info["program"]`."""
    info = extras.get("extra_info")
    return {**extras, "extra_info": {**(info or {}), "program": about}} if isinstance(info or {}, Mapping) else extras


def _failure(result: SandboxResult) -> str:
    if result.status == "memory":
        return "the program was ended, because all programs together used too much memory"
    how = (
        f"by signal {-result.exit}" if result.exit is not None and result.exit < 0 else f"with exit code {result.exit}"
    )
    last = result.stderr.strip().rpartition("\n")[2][-300:]
    return f"the program ended {how}" + (f": {last}" if last else "")
