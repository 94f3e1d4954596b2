"""Environments of Prime Intellect's `verifiers`, unmodified, from an installation of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv, AgentStopped
from skyrl_mega.envs.base import BaseTextEnvStepOutput, Message
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.harness.program import (
    TASK,
    TASK_VARIABLE,
    Program,
    check_box,
    check_variables,
    find_program,
    readable,
    values_of,
)
from skyrl_mega.envs.options import Option, group, mapping, number, switch, text, texts
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox, SandboxResult, variables
from skyrl_mega.envs.sandbox.run import GRACE_S, settings

NAME = "verifiers"
KEY = "environment.options.verifiers"
BOX = f"{KEY}.sandbox"
"""Setting of the sandbox."""
RUNNER = Path(__file__).with_name("runner.py")
OWN = "SKYRL_OWN_"
"""Prefix of the environment's own variables, as in the runner."""
LIMITS = CommandLimits(cpu_s=86400, memory_mib=8192, processes=256, file_mib=64, open_files=1024, output_kib=4096)
"""Default limits of a rollout's process."""
PACKAGE = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.+-]+)?")
"""Allowed names of an environment: `name`, `owner/name`, `owner/name@version`."""
LOADING_S = 600.0
"""Longest time for loading an environment and listing its tasks."""


STOPPED = ("ModelError", "OverlongPromptError", "ProviderError", "HarnessError")
"""Errors of the agent alone, mostly for a refused request."""


class VerifiersFailed(RuntimeError):
    """A failure of the environment or of its process."""


class VerifiersStopped(AgentStopped):
    """An agent of the environment that ended with an error."""


class VerifiersEnv(AgentEnv):
    """A rollout of an environment made for `verifiers`: a process of the environment's own installation plays the row's
    task with the policy, and the environment's own rewards judge it.

    The row's task is the environment's own record (`python -m skyrl_mega.data verifiers`).
    """

    requires_ground_truth: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "env": text(None, "the environment's package, as for verifiers: name, or owner/name@version"),
        "args": mapping("arguments of load_environment; of a task set, the configuration of taskset and agents"),
        "python": text(None, "interpreter with verifiers and the environment installed; by default this one"),
        "timeout_s": number(600.0, "for the agent", above=0, high=86400),
        "scoring_s": number(120.0, "for loading and scoring, in addition", above=0, high=86400),
        "variables": mapping("further environment variables; null copies the run's own"),
        "read": texts([], "further files and folders that the environment may read in the sandbox"),
        "confined": switch(True, "in the sandbox, where it reaches the policy only; false: as a process of yours"),
        "sandbox": group(
            {name: option for name, option in settings(LIMITS).items() if name != "wall_s"}, "limits of the process"
        ),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.program = _program(self.options, "play")

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError for a malformed name of a package, or a variable with another value than a text."""
        if options["env"] is not None and not PACKAGE.fullmatch(options["env"]):
            raise UserError(
                "allowed: name, owner/name or owner/name@version, of an installed package",
                key=f"{KEY}.env",
                value=options["env"],
            )
        check_variables(options["variables"], f"{KEY}.variables")

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Loads the environment once, as a rollout does.

        Raises:
            UserError: The environment cannot be loaded or used, a variable is not set, or the machine lacks a
                confinement.
            InfrastructureFault: The sandbox does not start.
        """
        program = _program(options, "check")
        check_box(program.box, BOX)
        result = program.box.run(
            program.argv,
            files={TASK: json.dumps(_order(options, 1))},
            environment={**program.environment, TASK_VARIABLE: Path(TASK)},
            limits=replace(program.box.limits, wall_s=LOADING_S),
        )
        refuse_failure(_result(result), options)

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a row is no task of the environment; None for a task."""
        info = row.get("extra_info")
        task = info.get("task") if isinstance(info, Mapping) else None
        if not isinstance(info, Mapping) or not isinstance(task, str) or _json(task) is None:
            return (
                f"column extra_info.task = {shown(task)}: allowed is a task as JSON; make the rows with python -m "
                "skyrl_mega.data verifiers"
            )
        if info.get("env") != options["env"]:
            return f"column extra_info.env = {shown(info.get('env'))}: allowed is {KEY}.env, {options['env']}"
        return None

    @classmethod
    def longest_run_s(cls, options: Mapping[str, Any]) -> float:
        """Returns `timeout_s` + `scoring_s` and the time for ending the process, in seconds."""
        return float(options["timeout_s"]) + float(options["scoring_s"]) + GRACE_S

    @classmethod
    def with_absolute_paths(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the options with absolute paths of the interpreter and in `read`."""
        changed = dict(options)
        if options.get("python") and "/" in options["python"]:
            changed["python"] = os.path.abspath(options["python"])
        if options.get("read"):
            changed["read"] = [os.path.abspath(path) for path in options["read"]]
        return changed

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Plays the row's task; the environment's rewards and metrics become figures of the trajectory.

        Args:
            endpoint: Address and key of the policy.
            prompt: Unused: the row's task is the environment's own record.

        Returns:
            The environment's reward; no observations and `done` True. `metadata` has `metrics`, the environment's own
            with `verifiers_s` (seconds) and `verifiers_cut` (1 if the rollout was cut off), and `verifiers` with `env`,
            `stop` (the reason of the end) and `stderr`.

        Raises:
            VerifiersStopped: The environment's agent ended with an error, as after a refused request.
            VerifiersFailed: The environment or its process failed, or took longer than `timeout_s` + `scoring_s`.
            InfrastructureFault: A service below the environment failed, or the process was killed from outside.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        order = _order(self.options, self.max_turns) | {"task": json.loads(self.extras["extra_info"]["task"])}
        with closing(self.program.box.workspace()) as folder:
            ran = self.program.run(endpoint, folder, {TASK: json.dumps(order)})
        result = _result(ran)
        if "error" in result:
            raise failure(self.options["env"], result["error"])
        notes = {
            "metrics": {
                **result["metrics"],
                "verifiers_s": ran.seconds,
                "verifiers_cut": float(result["notes"]["cut"]),
            },
            "verifiers": {"env": self.options["env"], "stop": result["notes"]["stop"], "stderr": ran.stderr[-2000:]},
        }
        return BaseTextEnvStepOutput(observations=[], reward=float(result["reward"]), done=True, metadata=notes)


def failure(env: str, problem: Mapping[str, Any]) -> RuntimeError:
    """Returns, and does not raise, the exception for a failure reported by the runner: InfrastructureFault for a
    service below the environment, VerifiersStopped for the agent alone, else VerifiersFailed.

    Args:
        env: Name of the environment, for the text.
        problem: `kind`, `text` and `infrastructure`, from `runner.failure`.
    """
    text = f"{env}: {problem['kind']}: {problem['text']}"
    if problem["infrastructure"]:
        return InfrastructureFault(text)
    return VerifiersStopped(text) if problem["kind"] in STOPPED else VerifiersFailed(text)


def tasks(options: Mapping[str, Any], train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns `train` and `test` → tasks of an environment, as `prompt`, messages for people, and `task`, the record of
    the environment. Loads the environment in an unconfined process: many download their data.

    The test tasks are the environment's evaluation data, or the tasks after the training tasks. An environment with
    fewer tasks gives fewer. The time limit is `LOADING_S`.

    Args:
        options: Options of the environment, with defaults filled in.
        train: Maximum number of training tasks.
        test: Maximum number of test tasks.

    Raises:
        UserError: The environment cannot be loaded in time, or has no training data; or `env`, the interpreter or a
            variable is missing.
    """
    options = {**options, "confined": False}
    program = _program(options, "tasks")
    order = _order(options, 1) | {"confined": None, "train": train, "test": test}
    try:
        ran = subprocess.run(
            program.argv,
            input=json.dumps(order),
            stdout=subprocess.PIPE,
            env={**os.environ, **program.environment},
            timeout=LOADING_S,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"it was not loaded within {LOADING_S:g} s", key=f"{KEY}.env", value=options["env"]) from error
    result = _json(ran.stdout) or _ended(f"with exit code {ran.returncode}", "see above")
    refuse_failure(result, options)
    return {name: list(records) for name, records in result.items()}


def refuse_failure(result: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises UserError if the result of the runner has an `error`; does nothing for other results.

    Args:
        result: Result of the runner.
        options: Options of the environment, for the message.
    """
    if "error" not in result:
        return
    problem = result["error"]
    reason = " ".join(problem["text"].split())[-500:]
    no_network = "; in the sandbox it has no network, with confined: false it has yours" if options["confined"] else ""
    raise UserError(
        reason if problem["kind"] == "Unfit" else f"it cannot be loaded: {problem['kind']}: {reason}{no_network}",
        key=f"{KEY}.env",
        value=options["env"],
    )


def _order(options: Mapping[str, Any], max_turns: int) -> dict[str, Any]:
    return {
        "env": options["env"],
        "args": options["args"],
        "confined": options["confined"],
        "timeout_s": options["timeout_s"],
        "max_turns": max_turns,
    }


def _program(options: Mapping[str, Any], command: str) -> Program:
    """Returns the process of the runner.

    Raises:
        UserError: `env` or a variable is not set, or there is no such interpreter.
    """
    if options["env"] is None:
        raise UserError("it is not set; allowed: the name of an installed package", key=f"{KEY}.env")
    confined = options["confined"]
    python = find_program(options["python"] or os.path.abspath(sys.executable), confined, f"{KEY}.python")
    argv = [python, str(RUNNER), command]
    sandbox = Sandbox.from_options(options["sandbox"], BOX, LIMITS)
    box = replace(sandbox, read=readable(argv, options["read"]), confined=confined)
    path = (variables.inside() if confined else variables.of_this_user()).get("PATH", os.defpath)
    given = values_of(options["variables"], f"{KEY}.variables")
    environment = {f"{OWN}{name}": value for name, value in given.items()}
    environment["PATH"] = f"{os.path.dirname(python)}:{path}"
    return Program(tuple(argv), box, float(options["timeout_s"]) + float(options["scoring_s"]), environment)


def _result(ran: SandboxResult) -> dict[str, Any]:
    """Returns the runner's result, or a failure if the runner printed none."""
    result = _json(ran.stdout)
    if result is not None:
        return result
    how = {
        "timeout": "after its time limit",
        "output": "after too much output",
        "disk": "after writing too much",
    }.get(ran.status, f"with exit code {ran.exit}")
    return _ended(how, ran.stderr.strip().rpartition("\n")[2][-500:])


def _ended(how: str, last: str) -> dict[str, Any]:
    text = f"its process ended {how}" + (f": {last}" if last else "")
    return {"error": {"kind": "VerifiersFailed", "text": text, "infrastructure": False}}


def _json(text: str) -> dict[str, Any] | None:
    """Returns the object in a line of JSON; None if the text is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
