"""Places in which a harness runs: the sandbox, a container of its own, or the container of a software task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.envs.base import BaseTextEnvStepOutput
from skyrl_mega.envs.containers import pool
from skyrl_mega.envs.containers.registry import make_pool
from skyrl_mega.envs.containers.runtime import Container
from skyrl_mega.envs.harness.container_program import ContainerProgram, check_reach, read_file
from skyrl_mega.envs.harness.judge import AnswerJudge
from skyrl_mega.envs.harness.program import (
    ANSWER,
    SCRIPTS,
    Program,
    check_box,
    find_program,
    read_answer,
    readable,
    values_of,
    words_of,
)
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox, SandboxResult, Workspace
from skyrl_mega.envs.swe.container_session import ContainerSession
from skyrl_mega.envs.swe.env import SweEnv
from skyrl_mega.envs.swe.task import IMAGE
from skyrl_mega.envs.waiting import waiting

KEY = "environment.options.harness"
BOX = f"{KEY}.sandbox"
"""Setting of the sandbox."""
LIMITS = CommandLimits(cpu_s=86400, memory_mib=65536, processes=256, file_mib=64, open_files=1024, output_kib=4096)
"""Default limits of the program, wide enough for interpreters that reserve much address space."""
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Environment variable that makes Python print at once, so that a program ended by a limit loses no output."""
START_S = 300.0
"""Seconds for starting a container."""


class ProgramPlace(Protocol):
    """A place for the program of one trajectory."""

    folder: str | None
    """The program's folder for this process, while the place is open; None in a container."""

    def open(self) -> None:
        """Creates the place, unless it is open. Raises InfrastructureFault if a container does not start, and UserError
        if its image does not exist."""

    def run(self, endpoint: AgentEndpoint, texts: Mapping[str, str]) -> SandboxResult:
        """Runs the program once, with files by name → text, and returns the result. A program ended by a limit is no
        error: the status names the limit. `endpoint` is the address of the policy, with its key. Raises
        InfrastructureFault if the program cannot be started."""

    def answer(self, most_bytes: int) -> str | None:
        """Returns the text of the answer's file, cut after `most_bytes`; None without such a file."""

    def close(self) -> None:
        """Removes the place with its files; may be called again."""


class ProgramFolder:
    """The sandbox, with a working folder of its own."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._workspace: Workspace | None = None
        self.folder: str | None = None

    def open(self) -> None:
        """Creates the working folder, unless it is open. Raises OSError if the folder cannot be created."""
        if self._workspace is None:
            self._workspace = self.program.box.workspace()
            self.folder = str(self._workspace.folder)

    def run(self, endpoint: AgentEndpoint, texts: Mapping[str, str]) -> SandboxResult:
        """Runs the program in the working folder to its end, or to a limit; all its processes are dead on return.

        Args:
            endpoint: Address and key of the policy.
            texts: Name → text of files, written into the working folder first.

        Returns:
            The result. A program ended by a limit is not an error: the status names the limit.

        Raises:
            InfrastructureFault: The program cannot be started, or the sandbox around it was killed. If
                `Program.kill_is_fault` is True, also after an end for memory, or by a SIGKILL that no limit sent.
            UserError: The machine lacks an isolation feature that the sandbox requires.
            RuntimeError: The place is not open.
        """
        return self.program.within(endpoint.seconds).run(endpoint, self._opened(), texts)

    def answer(self, most_bytes: int) -> str | None:
        """Returns the text of the file `ANSWER` in the working folder, cut after `most_bytes`; None without the file.
        Anything but a plain readable file, such as a link, counts as an empty text.

        Raises:
            InfrastructureFault: This machine cannot read the file.
            RuntimeError: The place is not open.
        """
        return read_answer(self._opened(), most_bytes)

    def close(self) -> None:
        """Removes the working folder with its files; may be called again."""
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _opened(self) -> Workspace:
        if self._workspace is None:
            raise RuntimeError("the working folder is not open")
        return self._workspace


class ProgramContainer:
    """A container of its own.

    Args:
        program: The program.
        containers: Starts the container.
        image: Image of the container.
    """

    folder: str | None = None

    def __init__(self, program: ContainerProgram, containers: pool.ContainerPlace, image: str) -> None:
        self.program, self._image, self._containers = program, image, containers
        self._container: Container | None = None

    def open(self) -> None:
        """Starts the container, unless it is open: waits for a place in the pool of containers, pulls the image, and
        starts the container within `START_S` seconds. All of this counts as waiting, not as time of the step.

        Raises:
            UserError: There is no such image, its registry refuses access, or the runtime has no folder for it.
            InfrastructureFault: No place becomes free, the pull fails or is late, or the container does not start.
        """
        if self._container is None:
            with waiting():
                self._container = self._containers.start(self._image, START_S)

    def run(self, endpoint: AgentEndpoint, texts: Mapping[str, str]) -> SandboxResult:
        """Runs the program in the container to its end, or to a limit; all its processes are dead on return.

        Args:
            endpoint: Address and key of the policy, passed to the program in environment variables.
            texts: Name → text of files, written into the program's folder (`container_program.FOLDER`) first.

        Returns:
            The result. A program that is late or prints too much is not an error: the status says so.

        Raises:
            InfrastructureFault: The program cannot be started, or the container is gone.
            RuntimeError: The place is not open; `run` does not start the container.
        """
        return self.program.run(self._opened(), endpoint, texts, None)

    def answer(self, most_bytes: int) -> str | None:
        """Returns the text of the file `ANSWER` in the program's folder (`container_program.FOLDER`), cut after
        `most_bytes`; None without the file. Anything but a plain readable file, such as a link, counts as an empty
        text.

        Raises:
            InfrastructureFault: The container is gone.
            RuntimeError: The place is not open.
        """
        return read_file(self._opened(), ANSWER, most_bytes)

    def close(self) -> None:
        """Removes the container and gives its place in the pool back; may be called again. A slow or failed removal
        continues in the background and raises nothing."""
        if self._container is not None:
            container, self._container = self._container, None
            self._containers.remove(container)
        self._containers.close()

    def _opened(self) -> Container:
        if self._container is None:
            raise RuntimeError("the container is not open")
        return self._container


class TaskContainer:
    """The container of a software task, in the folder of the repository. The task's own tests judge the work.

    Args:
        program: The program.
        task: Environment of the task, with a session in a container.
    """

    folder: str | None = None

    def __init__(self, program: ContainerProgram, task: SweEnv) -> None:
        self.program, self.task = program, task
        self._open = False

    def open(self) -> None:
        """Opens the task's session, unless it is open: starts the task's container with its files.

        Raises:
            UserError: The task cannot be used, such as for a missing image.
            InfrastructureFault: The container does not start.
        """
        if not self._open:
            self.task.init([])
            self._open = True

    def run(self, endpoint: AgentEndpoint, texts: Mapping[str, str]) -> SandboxResult:
        """Runs the program in the folder of the repository, after the task's prelude, to its end or to a limit; all its
        processes are dead on return.

        Args:
            endpoint: Address and key of the policy.
            texts: Name → text of files, written into the program's folder (`container_program.FOLDER`) first.

        Returns:
            The result. A program that is late or prints too much is not an error: the status tells.

        Raises:
            InfrastructureFault: The program cannot be started, or the container is gone.
            RuntimeError: The place is not open.
        """
        session = self.task.session
        if not isinstance(session, ContainerSession):
            raise TypeError(f"a session of {type(session).__name__} has no container")
        program = replace(self.program, argv=tuple(session.after_prelude(self.program.argv)))
        return program.run(session.container, endpoint, texts, session.folder)

    def answer(self, most_bytes: int) -> str | None:
        """Returns None, whatever `most_bytes`: the answer is the repository, judged by `verdict`."""
        return None

    def verdict(self) -> BaseTextEnvStepOutput:
        """Judges the changes to the repository by the task's tests, and removes the program's container, because the
        tests run in new containers. No `run` is possible afterwards.

        Returns:
            `reward` 1 if the tests pass and the canaries fail, else 0; `done` True; notes in `metadata`.

        Raises:
            InfrastructureFault: The container is lost, or a container for the tests does not start.
            UserError: The task's test patch does not apply, or its hidden files cannot be read.
        """
        return self.task.out_of_time()

    def close(self) -> None:
        """Closes the task's session and removes its container; may be called again."""
        self.task.close()


def place_of(options: Mapping[str, Any], judge: AnswerJudge, extras: Mapping[str, Any]) -> ProgramPlace:
    """Returns the place of the program for a row; creates nothing yet.

    Args:
        options: `environment.options.harness`, with defaults filled in.
        judge: The judge of the options.
        extras: The row's columns.

    Raises:
        UserError: `command` is missing, the program, a script or a variable does not exist, an option of the sandbox is
            wrong, the row has no image or no valid image, or its software task cannot be read.
    """
    if issubclass(judge.cls, SweEnv):
        task = judge.cls(env_config=judge.options, extras={**extras, "max_turns": 1})
        return TaskContainer(_container_program(options), task)
    if options["container"] is None:
        return ProgramFolder(_sandbox_program(options))
    if wrong := wrong_image(options, extras):
        raise UserError(wrong)
    image = image_of(options, extras)
    if image is None:
        raise UserError(
            "neither the row's extra_info.image nor this setting names an image",
            key=f"{KEY}.image",
            fix="give the name of an image",
        )
    return ProgramContainer(_container_program(options), _pool(options).place(), image)


def in_container(options: Mapping[str, Any]) -> bool:
    """Returns True if the program runs in a container; the options may lack defaults."""
    return options.get("container") is not None or options.get("reward") == "swe"


def image_of(options: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
    """Returns the image for a row with these columns: `extra_info.image`, else the option `image`; None if both are
    missing."""
    info = columns.get("extra_info")
    image = info.get("image") if isinstance(info, Mapping) else None
    return image or options["image"]


def wrong_image(options: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
    """Returns the reason for refusing the image of a row with these columns; None for an image's name, without an
    image, and for the image of the options."""
    image = image_of(options, columns)
    if image is None or image == options["image"] or (isinstance(image, str) and IMAGE.fullmatch(image)):
        return None
    return f"column extra_info.image = {shown(image)}: allowed is an image's name, such as python:3.11"


def check_options(options: Mapping[str, Any], judge: AnswerJudge) -> None:
    """Checks the options of containers.

    Args:
        options: Options of the environment, with defaults.
        judge: The environment that judges the answer, with its options.

    Raises:
        UserError: There is no such runtime, an option of the runtime is wrong, its containers cannot reach the policy,
            or `container` is given beside a software task, which has its own.
    """
    name, key = options["container"], f"{KEY}.container"
    if issubclass(judge.cls, SweEnv):
        if name is not None:
            raise UserError(
                "the program runs in the container of the software task", key=key, value=name, fix="leave it out"
            )
        check_reach(judge.options["session"], judge.options["session_options"], f"{KEY}.reward_options.session")
    elif name is not None:
        check_reach(name, options["container_options"], key)
        _pool(options)


def check_ready(options: Mapping[str, Any], judge: AnswerJudge) -> None:
    """Checks the program, and the sandbox or the container runtime on this machine.

    Args:
        options: Options of the environment, with defaults.
        judge: The environment that judges the answer; not used.

    Raises:
        UserError: `command` is missing, the program or a script does not exist, a variable is not set, or the machine
            lacks a confinement or the runtime.
        InfrastructureFault: The sandbox, or the client of the containers, does not start.
    """
    if not in_container(options):
        check_box(_sandbox_program(options).box, BOX)
        return
    _container_program(options)
    if options["container"] is not None:
        _pool(options).runtime.check(f"{KEY}.container_options")


def _pool(options: Mapping[str, Any]) -> pool.ContainerPool:
    return make_pool(options["container"], options["container_options"], f"{KEY}.container_options")


def _command(options: Mapping[str, Any]) -> str:
    if options["command"] is None:
        raise UserError("it is not set; allowed is a program and its arguments", key=f"{KEY}.command")
    return str(options["command"])


def _container_program(options: Mapping[str, Any]) -> ContainerProgram:
    return ContainerProgram.of(
        _command(options),
        f"{KEY}.command",
        timeout_s=float(options["timeout_s"]),
        environment=UNBUFFERED | values_of(options["variables"], f"{KEY}.variables"),
        output_bytes=int(options["sandbox"]["output_kib"]) * 1024,
    )


def _sandbox_program(options: Mapping[str, Any]) -> Program:
    words = words_of(_command(options), f"{KEY}.command")
    argv = [find_program(words[0], options["confined"], f"{KEY}.command"), *words[1:]]
    scripts = (word for word in words[1:] if word.endswith(SCRIPTS))
    for name, paths in (("command", scripts), ("read", options["read"])):
        for path in paths:
            if not os.path.exists(path):
                raise UserError("there is no such file", key=f"{KEY}.{name}", value=path, fix="correct the path")
    sandbox = Sandbox.from_options(options["sandbox"], BOX, LIMITS)
    box = replace(sandbox, read=readable(argv, options["read"]), confined=options["confined"])
    given = UNBUFFERED | values_of(options["variables"], f"{KEY}.variables")
    # A SIGKILL may be the policy's own, sent to have a bad answer discarded.
    return Program(tuple(argv), box, float(options["timeout_s"]), given, kill_is_fault=False)
