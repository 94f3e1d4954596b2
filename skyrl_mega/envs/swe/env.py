"""Long-horizon software tasks: the policy works on a repository through shell commands; tests give the reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.options import Option, choice, mapping, number, text, texts, whole
from skyrl_mega.envs.swe import sessions
from skyrl_mega.envs.swe.container_session import ContainerSession
from skyrl_mega.envs.swe.judge import Judge, TestVerdict
from skyrl_mega.envs.swe.session import CommandResult, Files, UnfitError
from skyrl_mega.envs.swe.task import NAME, read_task, refuse_outside_link, required_tests
from skyrl_mega.envs.tags import first_tag
from skyrl_mega.envs.waiting import working_clock

ANYWHERE = (
    *("tests/*", "test/*", "tests.py", "test_*.py", "conftest.py"),
    *("__pycache__/*", "sitecustomize.py", "usercustomize.py"),
)
"""Protected files of the top folder and of every folder below."""
PROTECTED = [
    *ANYWHERE,
    *(f"*/{pattern}" for pattern in ANYWHERE),
    *("*_test.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
    *("unittest.py", "unittest/*", "pytest.py", "pytest/*", "_pytest/*"),
    *("*.pth", "*.egg-info/*", "*.dist-info/*", ".venv/*", "*/site-packages/*"),
]
"""Files that decide the behaviour of a test command. Files started by the command are protected too
(`judge.started_files`).
"""
SUBMIT = re.compile(r"<submit\s*/?>")
LONGEST_COMMAND = 100_000
"""Maximum length of a command, in bytes; the kernel refuses an argument of 128 KiB."""
MOST_IGNORED = 20
"""Maximum number of paths in the metadata `changes_ignored`."""
INVALID = "Give one command inside <bash>…</bash>, or <submit/> when the work is done."


class SweEnv(BaseTextEnv):
    """A software task. `<bash>…</bash>` runs a command in the trajectory's own session and returns the output.
    `<submit/>`, or the last turn, ends the trajectory. Then the row's ground truth, the test command, runs on clean
    copies with the policy's changes: reward 1 if the tests pass and the canaries fail, else 0.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "tasks": text(None, "folder of the tasks"),
        "session": text("local", "local, a container runtime such as podman, or package.module:Class"),
        "session_options": mapping("limits of the sandbox of local; options of the container; of the class"),
        "protected": texts(PROTECTED, "files that are as the task says when the tests run"),
        "proof": choice("auto", "canaries", "exit", doc="what shows that the tests passed: see docs/swe.md"),
        "checks": whole(2, "runs with the tests as they are, and as many with a wrong assertion", low=1, high=100),
        "command_timeout_s": number(20.0, "for a command of the policy's", above=0, high=86400),
        "test_timeout_s": number(
            30.0, "for the tests; with the command's below rollout.env_timeout_s", above=0, high=86400
        ),
        "shown_characters": whole(4000, "of an output, its two ends", low=2),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        info = self.extras.get("extra_info") or {}
        name = str(info.get("task"))
        if self.options["tasks"] is None:
            raise UserError("it is not set; allowed is the folder of the tasks", key="environment.options.swe.tasks")
        if not NAME.fullmatch(name):
            raise UserError(
                "allowed is the name of a folder in environment.options.swe.tasks", key="extra_info.task", value=name
            )
        try:
            self.names = required_tests(info)
        except UserError as error:
            raise UserError(f"task {name}, extra_info, {error}") from error
        self.task = Path(self.options["tasks"]) / name
        for part in ("repo", "hidden"):
            refuse_outside_link(self.task / part, self.task.parent)
        self.sessions = sessions.Sessions(self.options)
        self.session = self.sessions.new(self.task, tracked=True)
        self._is_closed = False

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError for an unknown kind of session, and for unknown or wrong options of the session."""
        sessions.check_session(options)

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks the folder of tasks, and this machine's container runtime, or confinement of local sessions.

        Raises:
            UserError: The folder is missing, the runtime does not work, or the machine lacks a confinement.
            InfrastructureFault: The sandbox, or the client of the containers, does not start.
        """
        if options["tasks"] is None or not Path(options["tasks"]).is_dir():
            raise UserError(
                "allowed: the folder of the tasks", key="environment.options.swe.tasks", value=options["tasks"]
            )
        sessions.check_machine(options)

    @classmethod
    def try_machine(cls, options: Mapping[str, Any]) -> None:
        """Starts and removes a container for the first task, as a trajectory does; pulls a missing image. Does nothing
        for other sessions.

        Raises:
            UserError: The image does not exist, or the container does not start.
        """
        sessions.try_container(options)

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a text that is not empty, the tests' shell command; else the reason."""
        return None if isinstance(truth, str) and truth.strip() else "allowed is the tests' command, a text"

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a row is wrong: it names no task, its task is malformed or cannot run in the session,
        its names of tests are malformed, or its ground truth is no command. None for a valid row.

        A row without a ground truth is valid. A task without a folder has the defaults, and is wrong only if the
        session needs the folder's `repo/`, or an image that the options do not name.
        """
        info = row.get("extra_info") or {}
        name = info.get("task") if isinstance(info, Mapping) else None
        folder = options["tasks"]
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"column extra_info.task = {shown(name)}: allowed is the name of a task's folder"
        try:
            wrong = sessions.wrong_task(read_task(Path(folder, name)), options)
        except UserError as error:
            return f"column extra_info.task = {name}: {error}"
        if wrong:
            return f"column extra_info.task = {name}: {wrong}"
        try:
            required_tests(info)
        except UserError as error:
            return f"column extra_info.{error}"
        return super().wrong_row(row, options)

    @classmethod
    def longest_step_s(cls, options: Mapping[str, Any]) -> float:
        """Returns `command_timeout_s` + `test_timeout_s`, in seconds: a last turn runs a command and the tests."""
        return float(options["command_timeout_s"]) + float(options["test_timeout_s"])

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Opens the session: starts the container, or copies the repository into a sandbox. Returns the prompt
        unchanged, and no information.

        Raises:
            UserError: The task has no repository, or the repository exceeds the disk limit. For a container, no image
                is named, or the image does not exist or lacks a tool or the folder.
            InfrastructureFault: The container does not start or does not take the files, or a script of the task fails.
        """
        self.session.open(float(self.options["command_timeout_s"]))
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Runs the command in `<bash>` and returns its output, or judges the work after `<submit/>`; the first of the
        two tags counts.

        An action with neither tag gets an explanation of the tags. The last turn (`max_turns`) runs its command, if it
        has one, and then judges the work. Judged work has reward 1 if the tests pass and the canaries fail, else 0. A
        turn that does not judge has reward 0.

        `metadata` has `command` (None without one), after a command `status` and `tool_calls`, and after judging
        `tests`, `tests_unproved`, `tests_output`, `canaries` and, if the work could be read, `changes_ignored`.

        Raises:
            InfrastructureFault: The sandbox cannot start a command, the container is lost, or a container for the tests
                does not start.
            UserError: The task's test patch does not apply, its hidden files cannot be read, or the machine lacks a
                confinement.
        """
        self.turns += 1
        deadline = working_clock() + self.longest_step_s(self.options)
        tag, submit = first_tag(action, "bash"), SUBMIT.search(action)
        done = submit is not None and (tag is None or submit.start() < tag.start)
        command = tag.text if tag is not None and not done else None
        metadata: dict[str, Any] = {"command": command}
        reply = INVALID
        if command is not None:
            ran = unfit(command) or self.session.run(command, float(self.options["command_timeout_s"]))
            reply, metadata["status"] = _report(ran, int(self.options["shown_characters"])), ran.status
            metadata["tool_calls"] = [{"name": "bash", "arguments": {"command": command}}]
        if done or self.turns >= self.max_turns:
            return self._judge(metadata, deadline)
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": reply}], reward=0.0, done=False, metadata=metadata
        )

    def out_of_time(self) -> BaseTextEnvStepOutput:
        """Judges the work done so far by the tests, as after `<submit/>`, and closes the session. Returns reward 1 or
        0, and `done` True.

        Raises:
            InfrastructureFault: The container is lost, or a container for the tests does not start.
            UserError: The task's test patch does not apply, or its hidden files cannot be read.
        """
        return self._judge({"command": None}, working_clock() + self.longest_step_s(self.options))

    def _judge(self, metadata: dict[str, Any], deadline: float) -> BaseTextEnvStepOutput:
        judge = Judge(
            self.task, str(self.ground_truth), self.names, self.options, partial(self.sessions.new, self.task)
        )
        try:
            changes = self._changes(judge)
            metadata["changes_ignored"] = sorted(filter(judge.ignores, changes))[:MOST_IGNORED]
            self._close_session()  # the judge's containers take the place of the policy's
            verdict = judge.verdict(changes, deadline)
        except UnfitError as error:
            verdict = TestVerdict(CommandResult("failed", None, ""), str(error))
        metadata |= {"tests": verdict.ran.status, "tests_unproved": verdict.reason, "canaries": verdict.canaries}
        metadata["tests_output"] = verdict.ran.output[-2000:]
        return BaseTextEnvStepOutput(observations=[], reward=float(verdict.right), done=True, metadata=metadata)

    def _changes(self, judge: Judge) -> Files:
        """Returns the policy's changes; from a container without the content of files that are not judged."""
        seconds = float(self.options["command_timeout_s"])
        if isinstance(self.session, ContainerSession):
            return self.session.changes(seconds, judge.ignores)
        return self.session.changes(seconds)

    def close(self) -> None:
        """Closes the session, unless judging has closed it, and gives the place of the trajectory's containers back.
        May be called again."""
        try:
            self._close_session()
        finally:
            self.sessions.close()

    def _close_session(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.session.close(float(self.options["command_timeout_s"]))


def unfit(command: str) -> CommandResult | None:
    """Returns a failed result for a command with a NUL or of more than `LONGEST_COMMAND` bytes, which cannot be run;
    None for any other command."""
    if "\0" in command:
        return CommandResult("failed", 2, "a command cannot contain NUL")
    if len(command.encode()) > LONGEST_COMMAND:
        return CommandResult("failed", 126, f"a command has {LONGEST_COMMAND} bytes at most")
    return None


def _report(ran: CommandResult, limit: int) -> str:
    output = ran.output.rstrip("\n")
    if len(output) > limit:
        output = f"{output[: limit // 2]}\n… {len(output) - limit} characters left out …\n{output[-(limit // 2) :]}"
    ending = f"exit code {ran.exit}" if ran.status in ("ok", "failed") else ran.status
    return f"<output>\n{output}\n</output>\n({ending})"
