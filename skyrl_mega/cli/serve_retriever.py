"""Command line of the retrieval service for a run on other nodes: `python -m skyrl_mega.retriever run`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, FAULT, Parser, path_of
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.events import Event

LOOK_EVERY_S = 1.0
LAUNCHER_FLAGS = ("--dry-run", "--settings", "--simulate", "--json")
"""Options of the launcher without a value: a batch script gives both commands the same arguments."""
LAUNCHER_VALUES = ("--tokens", "--environment", "--turns", "--like")
"""Options of the launcher with a value; `--suggest` may have a value."""


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `python -m skyrl_mega.retriever run`."""
    p = Parser(
        prog="python -m skyrl_mega.retriever run",
        description="Serves environment.retriever.index of a run's settings on this node's address until SIGTERM or "
        "the removal of the address file. Builds a missing index if environment.retriever.build says how. Exit codes: "
        "0 ended on request, 2 the input is wrong, 1 the service cannot be kept alive.",
        allow_abbrev=False,
    )
    p.add_run()
    p.add_argument(
        "--address-file",
        type=path_of,
        required=True,
        metavar="FILE",
        help="written when it answers, readable by this user alone: a line with the address, a line with the token",
    )
    p.add_argument("--logs", type=path_of, default=Path("."), metavar="DIR", help="folder of retriever.log")
    for flag in LAUNCHER_FLAGS:
        p.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for option in LAUNCHER_VALUES:
        p.add_argument(option, help=argparse.SUPPRESS)
    p.add_argument("--suggest", nargs="?", help=argparse.SUPPRESS)
    return p


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m skyrl_mega.retriever run`: serves until SIGTERM, SIGINT or removal of the address file.

    Args:
        arguments: The command line after `run`.

    Returns:
        The exit code: 0 ended on request, 1 the service could not be kept alive.

    Raises:
        UserError: A setting, the data, the corpus or the index is invalid.
        OSError: The address file or the folder of logs cannot be written.
        InfrastructureFault, pyarrow.ArrowException: `data.prepare`, run for absent data, failed.
    """
    args = parser().parse_intermixed_args(list(arguments))
    if args.suggest and not args.suggest.isdigit():  # argparse took a setting for the option's value
        args.overrides.insert(0, args.suggest)
    from skyrl_mega.config.compose import compose_run
    from skyrl_mega.retriever.session import running_service

    address_file, logs = args.address_file.absolute(), args.logs.absolute()
    config = compose_run(args)
    environment = config.environment
    if environment.retriever.index is None:
        raise UserError(
            "the service needs the folder of an index",
            key="environment.retriever.index",
            value="null",
            fix="give the folder that `python -m skyrl_mega.retriever build` wrote",
        )
    if environment.retriever.build:
        _make_corpus(config)

    ending, lost = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())

    def say(line: str) -> None:
        print(line, flush=True)
        if isinstance(line, Event) and line.kind == "retriever_lost" and not line.facts["restarted"]:
            lost.set()
            ending.set()

    without_url = replace(environment, retriever=replace(environment.retriever, url=None))
    with running_service(without_url, logs, say, _host()) as served:
        url = served.retriever.url
        assert url is not None
        with _announced(address_file, url, os.environ[served.retriever.token_variable]):
            say("retriever: ready")
            while not ending.wait(LOOK_EVERY_S) and address_file.exists():
                pass
    return FAULT if lost.is_set() else DONE


def _make_corpus(config: Config) -> None:
    """Runs `data.prepare` if data files of the run are missing: the corpus may come from the same preparation."""
    from skyrl_mega.data.prepare import prepare
    from skyrl_mega.preflight.run_inputs import data_files

    files = [file for files in data_files(config).values() for file in files]
    if config.data.prepare and not all(Path(file).exists() for file in files):
        try:
            prepare(config.data.prepare)
        except UserError as error:
            raise UserError(error, key="data.prepare") from error


def _host() -> str:
    """Returns this node's address: of the interface SKYRL_MEGA_INTERFACE, else of the default route, as Ray does.

    Raises:
        UserError: The interface does not exist or has no IPv4 address, or there is no route.
    """
    from skyrl_mega.cluster.actor_process import address_of

    interface = os.environ.get("SKYRL_MEGA_INTERFACE")
    with suppress(OSError):
        if interface:
            if address := address_of(interface):
                return address
        else:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(("8.8.8.8", 53))  # sends nothing; selects the default route
                return str(probe.getsockname()[0])
    raise UserError(
        "allowed is an interface with an IPv4 address" if interface else "this node has no default route",
        key="SKYRL_MEGA_INTERFACE",
        value=interface or "not set",
        fix="name the interface that the nodes of the run can reach, such as ib0",
    )


@contextmanager
def _announced(file: Path, url: str, token: str) -> Iterator[None]:
    """Writes address and token to a file for the duration of a `with` block."""
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(f"{url}\n{token}\n")
    partial.rename(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
