"""The command line: compose, check, make ready, train; and the exit code.

Modules that are slow to import come in only when what stands before them has passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from skyrl_mega.config.errors import UserError
from skyrl_mega.trainer.stop import Stopped

DONE, FAULT, WRONG_INPUT, STOPPED = 0, 1, 2, 75
"""Exit codes. STOPPED (EX_TEMPFAIL): ended early by a signal; the same command goes on from the newest checkpoint."""


class Parser(argparse.ArgumentParser):
    """Its complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m skyrl_mega.launch --help")


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m skyrl_mega.launch`."""
    p = Parser(
        prog="python -m skyrl_mega.launch",
        description="Trains as a configuration file says. Exit codes: 0 done, 2 the input is wrong, 1 a fault, "
        "75 stopped early; the same command goes on.",
        allow_abbrev=False,
    )
    p.add_argument("--config", required=True, metavar="FILE", help="a .yaml file, such as configs/quickstart.yaml")
    p.add_argument(
        "--directory", metavar="DIR", help="where relative paths of the settings begin (default: the current directory)"
    )
    p.add_argument("--dry-run", action="store_true", help="check, print settings and layout, and stop")
    p.add_argument("--json", action="store_true", help="steps and summary as JSON lines on standard output")
    p.add_argument("overrides", nargs="*", metavar="group.key=value", help="settings over the file's: run.seed=1")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, _stop)
    try:
        return _run(parser().parse_intermixed_args(argv))
    except UserError as error:
        if "--json" in argv:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except Stopped as stopped:
        print(f"stopped by {stopped}; the same command goes on from the newest checkpoint", file=sys.stderr)
        return STOPPED


def _run(args: argparse.Namespace) -> int:
    from skyrl_mega.config.checks import check
    from skyrl_mega.config.compose import compose, dump

    file = args.config
    if args.directory:
        file = Path(file).absolute()
        _enter(args.directory)
    config = compose(file, args.overrides)
    check(config)

    from skyrl_mega.launch import inputs, layout

    hf = inputs.check_inputs(config)
    if args.dry_run:
        if args.json:
            print(json.dumps({"config": asdict(config), "policy": layout.seats(config, hf)}))
        else:
            print(f"{dump(config)}\n{layout.table(config, hf)}\nnothing was started (--dry-run)")
        return DONE

    from skyrl_mega.telemetry.console import Console
    from skyrl_mega.telemetry.run_dir import run_folder

    with Console(as_json=args.json) as console, run_folder(config) as folder:
        console.log_to(folder / "logs" / "run.log")
        config = inputs.prepare(config, console)

        from skyrl_mega import trainer
        from skyrl_mega.cluster.errors import ActorFailed, ClusterError

        try:
            trainer.run(config, folder, console)
        except (ActorFailed, ClusterError) as error:
            console.say(f"fault: {error}")
            console.say(f"  logs  {folder / 'logs'}")
            return FAULT
        except Exception:
            _keep_traceback(folder)
            raise
    return DONE


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise UserError(
            f"--directory {directory}: {error.strerror}; give a folder that exists, seen by every node of a cluster"
        ) from error


def _keep_traceback(folder: Path) -> None:
    with (folder / "logs" / "run.log").open("a") as log:
        log.write(traceback.format_exc())


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGTERM:  # it may come twice, from a scheduler and from our own parent: no reason to break off
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)
