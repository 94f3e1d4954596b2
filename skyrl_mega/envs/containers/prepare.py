"""Implementation of `python -m skyrl_mega.envs.containers`: pulls the images of tasks, and checks a node."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, FAULT, Parser, integer, json_object, path_of, print_error
from skyrl_mega.envs.containers.pool import ContainerPool
from skyrl_mega.envs.containers.registry import RUNTIMES, make_pool
from skyrl_mega.envs.faults import InfrastructureFault

COMMAND_S = 120.0
"""Time limit in seconds for the start of a container, for a command in it and for its removal."""


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser: subcommands `pull` and `check`."""
    root = Parser(
        prog="python -m skyrl_mega.envs.containers",
        description="Pulls the images of tasks to this machine, and checks that containers start here.",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="pull|check")
    pull = commands.add_parser("pull", help="pulls images to this machine")
    pull.add_argument("--tasks", type=path_of, help="folder of tasks: FOLDER/<task>/task.json names an image each")
    pull.add_argument("--at-once", type=integer(1, 64), default=4, help="pulls at once (default: %(default)s)")
    check = commands.add_parser("check", help="starts a container of each given image, runs a command, removes it")
    for command in (pull, check):
        command.add_argument("images", nargs="*", metavar="IMAGE", help="name of an image")
        command.add_argument("--runtime", choices=RUNTIMES, default="podman", help="runtime (default: %(default)s)")
        command.add_argument(
            "--options", type=json_object, default={}, help="options of the runtime as JSON, as in session_options"
        )
    return root


def run(arguments: Sequence[str]) -> int:
    """Pulls the named images, with `check` also starts a container of each, and returns the exit code: 0, or 1 if an
    image cannot be pulled or started. Prints a line per image, and faults to standard error.

    Raises:
        UserError: An argument is wrong, no image is named, or the runtime does not work on this machine.
        InfrastructureFault: The runtime's client cannot be started.
        SystemExit: After printing the help for `--help`.
    """
    chosen = parser().parse_args(arguments)
    pool = make_pool(chosen.runtime, chosen.options, "--options")
    pool.runtime.check("--options")
    names = list(dict.fromkeys([*chosen.images, *(images_of(chosen.tasks) if getattr(chosen, "tasks", None) else ())]))
    if not names:
        raise UserError("no image is named", fix="name an image, or with --tasks a folder of tasks with images")
    report = partial(_report, pool, command=chosen.command)
    with ThreadPoolExecutor(getattr(chosen, "at_once", 1)) as threads:
        faults = [fault for fault in threads.map(report, names) if fault is not None]
    for fault in faults:
        print_error(f"fault: {fault}")
    print(f"{len(names) - len(faults)} of {len(names)} images are on this machine")
    return FAULT if faults else DONE


def images_of(tasks: Path) -> Iterator[str]:
    """Yields the image of each task in a folder (`<task>/task.json`, key `image`), in the order of the tasks' names and
    with repetitions; skips tasks whose `image` is missing, empty or no text.

    Raises:
        UserError: The folder does not exist, or a task's file cannot be read.
    """
    if not tasks.is_dir():
        raise UserError("there is no such folder", key="--tasks", value=tasks, fix="give the folder of the tasks")
    for file in sorted(tasks.glob("*/task.json")):
        image = safe_read.read_json(file, "write the task again").get("image")
        if isinstance(image, str) and image:
            yield image


def _report(pool: ContainerPool, image: str, *, command: str) -> str | None:
    """Pulls or checks an image and prints the time; returns the reason of a failure, or None."""
    start = time.monotonic()
    try:
        pool.pull(image)
        if command == "check":
            container = pool.runtime.start(image, COMMAND_S)
            try:
                if (ran := container.run(["sh", "-c", ":"], COMMAND_S)).status != "ok":
                    return f"{image}: a command in the container fails: {ran.last_line()}"
            finally:
                container.remove(COMMAND_S)
    except (InfrastructureFault, UserError) as error:
        return str(error)
    print(f"{image}: {time.monotonic() - start:.1f} s", flush=True)
    return None
