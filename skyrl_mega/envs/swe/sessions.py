"""Kinds of sessions by the name in `environment.options.swe.session`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers.pool import ContainerPlace
from skyrl_mega.envs.containers.registry import RUNTIMES, make_pool, options_of
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import filled
from skyrl_mega.envs.sandbox import Sandbox
from skyrl_mega.envs.swe.container_session import SESSION_OPTIONS, ContainerSession
from skyrl_mega.envs.swe.session import BOX, LocalSession, Session
from skyrl_mega.envs.swe.task import Task

KEY = "environment.options.swe.session"
COMMAND = "skyrl_mega.envs.containers"
"""Command that tries containers."""
METHODS = ("open", "run", "changes", "write", "close")


class Sessions:
    """Source of the sessions of a trajectory: the policy's, then the judge's.

    Args:
        options: `environment.options.swe`.

    Raises:
        UserError: There is no such kind of session, or an option of the session is wrong.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._given = options["session_options"]
        self._class = None if options["session"] in RUNTIMES else session_class(options["session"])
        self._place: ContainerPlace | None = None
        if self._class is None:
            self._options, runtime_options = container_options(options)
            self._place = make_pool(options["session"], runtime_options, BOX).place()

    def new(self, task: Path, *, tracked: bool = False) -> Session:
        """Returns a new session, not yet open.

        Args:
            task: Folder of the task.
            tracked: True if the changes will be read. A tracked session of a container does not contain hidden files.

        Raises:
            UserError: The task's `task.json` is malformed, or an option of the session is wrong.
        """
        if self._class is not None:
            return self._class(task, self._given)
        assert self._place is not None
        return ContainerSession(task, self._options, self._place, tracked=tracked)

    def close(self) -> None:
        """Gives the place of the trajectory's containers back; may be called again."""
        if self._place is not None:
            self._place.close()


def session_class(path: str) -> type[Session]:
    """Returns the class of a session that is not a container's; imports a class of the user.

    Args:
        path: `local`, or an import path.

    Raises:
        UserError: There is no such class, or a method is missing.
    """
    if path == "local":
        return LocalSession
    module, _, name = path.partition(":")
    allowed = f"allowed: local, {', '.join(RUNTIMES)}, package.module:Class"
    try:
        cls: type[Session] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{error}; {allowed}", key=KEY, value=path) from error
    missing = [method for method in METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise UserError(
            f"the class has no method {missing[0]}; allowed: a class as skyrl_mega.envs.swe.session.Session",
            key=KEY,
            value=path,
        )
    return cls


def container_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of a container's session, complete, and the given options of the runtime.

    Args:
        options: `environment.options.swe`, with a name in `RUNTIMES` as `session`.

    Raises:
        UserError: An option is unknown or has an invalid value.
    """
    given, kind = options["session_options"], options["session"]
    complete = filled(BOX, given, {**options_of(kind, KEY), **SESSION_OPTIONS})
    own = {name: complete[name] for name in SESSION_OPTIONS}
    return own, {name: value for name, value in given.items() if name not in SESSION_OPTIONS}


def check_session(options: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown kind of session, and for unknown or wrong options of the session.

    Args:
        options: `environment.options.swe`, with defaults filled in. Options of a user's own class are not checked.
    """
    if options["session"] in RUNTIMES:
        make_pool(options["session"], container_options(options)[1], BOX)
    elif session_class(options["session"]) is LocalSession:
        Sandbox.from_options(options["session_options"], BOX)


def check_machine(options: Mapping[str, Any]) -> None:
    """Checks the container runtime, or the confinement of local sessions, on this machine. Checks nothing for a user's
    own class.

    Args:
        options: `environment.options.swe`, with defaults filled in.

    Raises:
        UserError: The runtime does not work here, or the machine lacks a confinement.
        InfrastructureFault: The sandbox, or the client of the containers, does not start.
    """
    if options["session"] in RUNTIMES:
        make_pool(options["session"], container_options(options)[1], BOX).runtime.check(BOX)
    elif session_class(options["session"]) is LocalSession:
        Sandbox.from_options(options["session_options"], BOX).check(BOX)


def try_container(options: Mapping[str, Any]) -> None:
    """Starts and removes a container for the first task in the folder of tasks; pulls the image if it is missing. Does
    nothing without tasks, and for sessions that are no containers.

    Args:
        options: `environment.options.swe`, with defaults filled in.

    Raises:
        UserError: The container does not start, or the image does not exist.
    """
    task = next(iter(sorted(Path(options["tasks"]).glob("*/task.json"))), None)
    if options["session"] not in RUNTIMES or task is None:
        return
    source = Sessions(options)
    session = source.new(task.parent)
    try:
        session.open(0.0)
    except InfrastructureFault as fault:
        raise UserError(
            f"the container of task {task.parent.name} does not start: {fault}",
            key=BOX,
            fix=f"correct the options, or find the cause with python -m {COMMAND} check --runtime {options['session']}",
        ) from fault
    finally:
        session.close(0.0)
        source.close()


def wrong_task(task: Task, options: Mapping[str, Any]) -> str | None:
    """Returns the reason why a task cannot run in a session of the options (no image, or no `repo/`); None if it can.

    Args:
        task: The task.
        options: `environment.options.swe`, with defaults filled in.

    Raises:
        UserError: There is no such kind of session.
    """
    kind, image = options["session"], task.image or options["session_options"].get("image")
    if kind in RUNTIMES:
        return None if image else f"it names no image; name one in task.json or in {BOX}.image"
    if session_class(kind) is not LocalSession or task.repo.is_dir():  # other sessions may not need repo/ here
        return None
    if task.image is not None:
        return f"it needs a container, and {KEY} is {kind}; set {KEY}=podman"
    return f"{task.path.parent} has no {task.path.name}/repo; make it, or leave the row out"
