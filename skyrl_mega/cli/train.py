"""Command line of training: compose, check, prepare, train; and the exit code.

Slow imports happen only after the preceding checks have passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_mega.cluster.supervisor import STOPPED
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.unused import unused_notes
from skyrl_mega.config.command import DONE, FAULT, Parser, guarded, integer
from skyrl_mega.config.derived import cutoff_note, idle_gpus_note
from skyrl_mega.config.schema import Config
from skyrl_mega.trainer.shutdown import ShutdownRequest, Stopped, ending_signal

if TYPE_CHECKING:
    from skyrl_mega.telemetry.console import Console


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `python -m skyrl_mega.launch`."""
    p = Parser(
        prog="python -m skyrl_mega.launch",
        description="Trains as a configuration file says. Exit codes: 0 done, 2 the input is wrong, 1 a fault, "
        "75 stopped early; the same command goes on.",
        allow_abbrev=False,
    )
    p.add_run()
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="check, print layout, memory, sync plan and estimated times, and stop; needs no GPU",
    )
    p.add_argument("--settings", action="store_true", help="--dry-run prints every setting as well, at the end")
    p.add_argument(
        "--suggest",
        nargs="?",
        const="",
        metavar="GPUS",
        help="search layouts for so many GPUs (default: those of the settings), print those that fit, and stop",
    )
    p.add_argument(
        "--simulate",
        action="store_true",
        help="modes of asynchrony, splits of GPUs and engines, compared in virtual time, and stop; needs no GPU",
    )
    p.add_argument("--tokens", metavar="MEAN,SIGMA", help="tokens per trajectory, log-normal (--simulate, --dry-run)")
    p.add_argument("--environment", metavar="MEAN,SIGMA", help="seconds of the environment per turn")
    p.add_argument("--turns", type=integer(1, 1000), metavar="N", help="turns per trajectory (default: 1)")
    p.add_argument("--like", metavar="RUN", help="take tokens, seconds and turns from this run's folder")
    p.add_argument("--json", action="store_true", help="steps and summary, or the plan, as JSON on standard output")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.launch`: trains, or prints a dry run, suggestions or a simulation.

    Args:
        arguments: The command line without the program; None takes `sys.argv`.

    Returns:
        The exit code: 0 done, 1 fault, 2 invalid input, 75 stopped by a signal.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    return stoppable(lambda: _run(parser().parse_intermixed_args(argv)), "--json" in argv)


def stoppable(run: Callable[[], int], as_json: bool) -> int:
    """Runs a command with `command.guarded`, and turns a stop by a signal into exit code 75. Other errors of the
    command pass through.

    Args:
        run: The command; returns its exit code.
        as_json: True to print an error line on standard output too, as JSON.

    Returns:
        The exit code: the command's, 0 after help or a closed output, 1 after a disk error or `sys.exit` in user code,
        2 after a UserError or for a file that cannot be used, 75 after a signal.
    """
    try:
        return guarded(run, as_json)
    except Stopped:  # the supervisor prints the message
        return STOPPED


def _run(args: argparse.Namespace) -> int:
    from skyrl_mega.config.checks import check
    from skyrl_mega.config.compose import compose_run

    if args.suggest and not args.suggest.isdigit():  # argparse took a setting for the option's value
        args.overrides, args.suggest = [args.suggest, *args.overrides], ""
    _check_options(args)
    config = compose_run(args)
    if args.simulate or args.suggest is not None:
        from skyrl_mega.cli import simulate, suggest

        return simulate.run(config, args) if args.simulate else suggest.run(config, args)
    if args.dry_run:
        return _dry_run(config, args)
    if args.settings:
        raise UserError(
            "it has an effect only with --dry-run; a run writes its settings to config.yaml", key="--settings"
        )

    from skyrl_mega.cli import estimate, inputs, refusal, resuming

    data_notes: list[str] = []
    try:
        check(config)
        hf = inputs.check_inputs(config, data_notes.append)
    except UserError as error:
        raise _with_fix(error, config) from error

    from skyrl_mega.report.live.process import live_page
    from skyrl_mega.telemetry.console import Console
    from skyrl_mega.telemetry.events import Event
    from skyrl_mega.telemetry.run_dir import run_folder
    from skyrl_mega.telemetry.trackers import registry

    changed = resuming.changes(config)
    with Console(as_json=args.json, ended_by=ending_signal) as console, run_folder(config, console.say) as folder:
        console.log_to(folder / "logs" / "run.log")
        console.events_to(folder)
        if changed:
            console.say(Event("settings_changed", resuming.changes_text(changed), changes=changed))
        if finished := resuming.nothing_left(config):
            console.say(finished)
            return DONE
        config = _decided(_prepared(config, console), hf, folder, console)
        if misfit := refusal.find_error(config, hf, planned=False):
            raise refusal.with_fix(misfit, config, hf, planned=False)

        idle = idle_gpus_note(config) if config.cluster.device == "cuda" else None
        notes = idle, cutoff_note(config), *data_notes, *unused_notes(config), *registry.unused_notes(config.telemetry)
        for note in filter(None, notes):
            console.say(f"note: {note}")
        estimate.keep(folder, config, hf, console.say)

        with live_page(config.telemetry, folder, console):
            return _train(config, folder, console)


def _check_options(args: argparse.Namespace) -> None:
    """Raises a UserError for options that exclude each other."""
    if args.simulate:
        for name, given in (
            ("dry-run", args.dry_run),
            ("suggest", args.suggest is not None),
            ("settings", args.settings),
        ):
            if given:
                raise UserError(
                    "give one of them; each prints something else, and stops", key="--simulate", value=f"--{name}"
                )
    if args.suggest is not None and args.dry_run:
        raise UserError(
            "give one of them",
            key="--suggest",
            value="--dry-run",
            fix="--suggest prints for each layout the settings to give to --dry-run",
        )
    for name in () if args.simulate or args.dry_run else ("tokens", "environment", "turns", "like"):
        if getattr(args, name) is not None:
            raise UserError("it has an effect only with --simulate or --dry-run; give one of them", key=f"--{name}")


def _prepared(config: Config, console: Console) -> Config:
    """Creates absent model and data, and tries the machine before a run without a checkpoint; returns the settings with
    `cluster.device` decided."""
    from skyrl_mega.cli import prepare, resuming

    config = prepare.prepare(config, console)
    if resuming.checkpoint_of(config) is None:
        prepare.try_machine(config)
    return config


def _decided(config: Config, hf: Mapping[str, Any], folder: Path, console: Console) -> Config:
    """Returns the settings with `policy.micro_tokens` set; a new run prints a note unless the number was given."""
    if config.policy.micro_tokens is not None:
        return config
    from skyrl_mega.cli import resuming
    from skyrl_mega.models.registry import architecture
    from skyrl_mega.planner import micro_tokens

    resumes = resuming.checkpoint_of(config) is not None
    decided = micro_tokens.for_run(config, hf, folder, resumes=resumes)
    if not resumes and (note := micro_tokens.note(config, decided, architecture(hf).describe(hf))):
        console.say(f"note: {note}")
    return decided


def _train(config: Config, folder: Path, console: Console) -> int:
    """Trains and returns the exit code; on a fault prints its cause and the log folder."""
    from skyrl_mega.cluster.errors import Fault, fault_event
    from skyrl_mega.report.overview import write_at_end
    from skyrl_mega.trainer.checkpoints import describe_resume
    from skyrl_mega.trainer.train import train

    try:
        train(config, folder, console)
    except (Fault, OSError) as error:
        if ShutdownRequest().at_once:
            raise Stopped from error
        console.say(fault_event(error))
        resume = describe_resume(folder / "checkpoints", resume=config.checkpoint.resume)
        console.say(f"  logs  {folder / 'logs'}; {resume}")
        if isinstance(error, OSError):  # the disk is full or gone: only the traceback names the file
            _keep_traceback(folder, traceback.format_exc())
        write_at_end(folder, console.say)  # writes or updates the report, with the fault
        return FAULT
    except UserError as error:
        # The terminal shows the line as the last one of this command.
        console.note(fault_event(error))
        write_at_end(folder, console.say)
        raise
    except Exception as error:
        text = traceback.format_exc()
        _keep_traceback(folder, text)
        console.record(fault_event(error, text))
        write_at_end(folder, console.say)
        raise
    return DONE


def _dry_run(config: Config, args: argparse.Namespace) -> int:
    from skyrl_mega.cli import dry_run, dry_run_text
    from skyrl_mega.common.secrets import all_hidden
    from skyrl_mega.config.compose import dump

    data_notes: list[str] = []
    hf, absent = dry_run.checked(config, data_notes.append)
    values = all_hidden(dry_run.values(config, hf, absent, data_notes, args))
    print(json.dumps(values) if args.json else dry_run_text.text(values))
    if args.settings and not args.json:
        print(f"\nsettings:\n\n{dump(config)}", end="")
    return DONE


def _with_fix(error: UserError, config: Config) -> UserError:
    """Returns the error extended by working settings, if the model can be read."""
    from skyrl_mega.cli import inputs, refusal

    try:
        hf = inputs.model_config(config)
    except UserError:
        return error
    return refusal.with_fix(error, config, hf, planned=False)


def _keep_traceback(folder: Path, text: str) -> None:
    try:
        with (folder / "logs" / "run.log").open("a", encoding="utf-8") as log:
            log.write(text)
    except OSError:  # the log's disk is full or gone
        print(text, file=sys.stderr)
