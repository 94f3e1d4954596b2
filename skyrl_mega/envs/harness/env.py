"""Any program as an agent: reads a task, calls the policy by the SDK of an API, and writes an answer."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Mapping
from contextlib import closing
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs import registry
from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv, AgentStopped
from skyrl_mega.envs.base import BaseTextEnvStepOutput, Message
from skyrl_mega.envs.harness.judge import AnswerJudge
from skyrl_mega.envs.harness.program import (
    TASK,
    Program,
    check_network,
    check_variables,
    find_program,
    read_answer,
    readable,
    task_text,
    values_of,
    words_of,
)
from skyrl_mega.envs.options import Option, choice, group, mapping, number, switch, text, texts
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox, SandboxResult
from skyrl_mega.envs.sandbox.run import GRACE_S, settings
from skyrl_mega.envs.truths import SPECS

KEY = "environment.options.harness"
BOX = f"{KEY}.sandbox"
"""Setting of the sandbox."""
LIMITS = CommandLimits(cpu_s=86400, memory_mib=65536, processes=256, file_mib=64, open_files=1024, output_kib=4096)
"""Default limits of the program, wide enough for interpreters that reserve much address space."""
HIDDEN = ["answer", "solution", "extra_info.answer", "extra_info.solution"]
"""Usual columns of right answers beside the ground truth."""
SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts")
"""Endings of arguments that must be files."""
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
SHOWN = 2000
"""Characters kept of the end of each output, for people."""


class ProgramFailed(AgentStopped):
    """The program ended with an exit code other than 0, by a signal, or for memory."""


class HarnessEnv(AgentEnv):
    """A user's program, started once per trajectory with address and key of the endpoint in environment variables and
    the task in a file. A function in this process judges the answer, after the end of the program.
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
        "sandbox": group(
            {name: option for name, option in settings(LIMITS).items() if name != "wall_s"}, "limits of the program"
        ),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.program, self.judge = _parts(self.options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError for a command with an open quotation, a reward function without import or with other
        arguments, or a variable without text."""
        if options["command"] is not None:
            words_of(options["command"], f"{KEY}.command")
        if options["reward"] is not None:
            AnswerJudge.of(options["reward"], options["reward_options"], f"{KEY}.reward")
        check_variables(options["variables"], f"{KEY}.variables")

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks program, variables and the confinement on this machine.

        Raises:
            UserError: `command` or `reward` is missing, the program does not exist, a variable is not set, or the
                machine lacks a confinement.
        """
        program, judge = _parts(options)
        judge.cls.check_ready(judge.options)
        if program.box.confined:
            program.box.check(BOX)
            check_network(program.box, BOX)

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the judge's reason for refusing a row; None for an accepted row."""
        if options["reward"] is None:
            return None
        judge = AnswerJudge.of(options["reward"], options["reward_options"], f"{KEY}.reward")
        return judge.cls.wrong_row(row, judge.options)

    @classmethod
    def longest_run_s(cls, options: Mapping[str, Any]) -> float:
        """Returns `timeout_s` plus the time for ending the program, in seconds."""
        return float(options["timeout_s"]) + GRACE_S

    @classmethod
    def with_absolute_paths(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the options with absolute paths of the files in the command, in `read` and in `reward`."""
        changed = dict(options)
        if options.get("command"):
            changed["command"] = shlex.join(words_of(options["command"], f"{KEY}.command"))
        if options.get("reward"):
            changed["reward"] = registry.absolute(options["reward"])
        if options.get("read"):
            changed["read"] = [os.path.abspath(path) for path in options["read"]]
        return changed

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Runs the program and judges the answer: the file `answer.txt`, or without the file the standard output. After
        a time limit, or a limit of output or disk, the work so far is judged.

        Raises:
            ProgramFailed: The program failed, unless the option `failed_exit` is `judge`.
            InfrastructureFault: The program cannot be started.
        """
        limits = self.program.box.limits
        with closing(self.program.box.workspace()) as folder:
            task = {TASK: task_text(prompt, visible_columns(self.extras, self.options["hidden"]))}
            result = self.program.within(endpoint.seconds).run(endpoint, folder, task)
            if result.status in ("failed", "memory") and self.options["failed_exit"] == "error":
                raise ProgramFailed(_failure(result), {"program": _noted(result)})
            written = read_answer(folder, limits.output_kib * 1024)
            answer = result.stdout if written is None else written
            about = {"folder": str(folder.folder), "status": result.status, "exit": result.exit}
            judged = self.judge.verdict(_with_program(self.extras, about), prompt, answer)
        notes = dict(judged["metadata"])
        notes["metrics"] = {
            **notes.get("metrics", {}),
            "program_s": result.seconds,
            "program_cut": float(result.status not in ("ok", "failed")),
        }
        notes["program"] = _noted(result)
        return BaseTextEnvStepOutput(observations=[], reward=judged["reward"], done=True, metadata=notes)


def _parts(options: Mapping[str, Any]) -> tuple[Program, AnswerJudge]:
    """Returns the program and the judge of the options.

    Raises:
        UserError: `command` or `reward` is missing, the program does not exist, or a variable is not set.
    """
    rewards = "package.module:function, path/to/file.py:function, or an environment of one turn such as math"
    for name, form in (("command", "a program and its arguments"), ("reward", rewards)):
        if options[name] is None:
            raise UserError(f"it is not set; allowed is {form}", key=f"{KEY}.{name}")
    words = words_of(options["command"], f"{KEY}.command")
    argv = [find_program(words[0], options["confined"], f"{KEY}.command"), *words[1:]]
    scripts = (word for word in words[1:] if word.endswith(SCRIPTS))
    for name, paths in (("command", scripts), ("read", options["read"])):
        for path in paths:
            if not os.path.exists(path):
                raise UserError("there is no such file", key=f"{KEY}.{name}", value=path, fix="correct the path")
    sandbox = Sandbox.from_options(options["sandbox"], BOX, LIMITS)
    box = Sandbox(
        limits=sandbox.limits,
        without=sandbox.without,
        read=readable(argv, options["read"]),
        name=BOX,
        confined=options["confined"],
    )
    # A program ended by a limit keeps what it printed.
    given = UNBUFFERED | values_of(options["variables"], f"{KEY}.variables")
    judge = AnswerJudge.of(options["reward"], options["reward_options"], f"{KEY}.reward")
    # A SIGKILL may be the policy's own, sent to have a bad answer discarded.
    return Program(tuple(argv), box, float(options["timeout_s"]), given, kill_is_fault=False), judge


def _noted(result: SandboxResult) -> dict[str, Any]:
    """Returns the facts about a program kept with the trajectory."""
    outputs = {"stdout": result.stdout[-SHOWN:], "stderr": result.stderr[-SHOWN:]}
    return {"status": result.status, "exit": result.exit, "seconds": result.seconds, **outputs}


def visible_columns(extras: Mapping[str, Any], hidden: list[str]) -> dict[str, Any]:
    """Returns the columns of a row for the program: all but the ground truth and hidden columns.

    Args:
        extras: The row's columns.
        hidden: Names of columns, or of entries of columns (`extra_info.answer`).
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
