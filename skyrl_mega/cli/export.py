"""Command line of an export, and its exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from skyrl_mega.config.command import DONE, FAULT, Parser, guarded, integer, path_of, real

DTYPES = ("as-trained", "bfloat16", "float32", "block-fp8")


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `python -m skyrl_mega.export`."""
    p = Parser(
        prog="python -m skyrl_mega.export",
        description="Writes a run's checkpoint as a Hugging Face directory, without a GPU. Exit codes: 0 done, 2 the "
        "input is wrong, 1 a fault, 75 stopped by a signal.",
        allow_abbrev=False,
    )
    p.add_argument("source", type=path_of, metavar="RUN", help="a run's folder, or one checkpoint of it")
    p.add_argument("--output", type=path_of, required=True, metavar="DIR", help="a new or an empty directory")
    p.add_argument(
        "--step", type=integer(0, 10**9), metavar="N", help="which checkpoint of the run (default: the newest)"
    )
    p.add_argument(
        "--model", type=path_of, metavar="DIR", help="configuration and tokenizer (default: the run's model)"
    )
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of the files; block-fp8: the FP8 of the model directory (default: %(default)s)",
    )
    p.add_argument(
        "--from",
        dest="origin",
        choices=("weights", "master"),
        default="weights",
        help="what the model computes with, or the optimizer's float32 copies (default: %(default)s)",
    )
    p.add_argument("--workers", type=integer(1, 1024), metavar="N", help="processes (default: one a core, 16 at most)")
    p.add_argument(
        "--shard-gib",
        type=real(0.001, 1e6),
        default=5.0,
        metavar="GIB",
        help="size of a file (default: %(default)s)",
    )
    p.add_argument("--verify", action="store_true", help="read every tensor back and compare it with the checkpoint")
    p.add_argument("--json", action="store_true", help="what was done as one JSON object on standard output")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.export`: writes a checkpoint of a run as a Hugging Face directory.

    Args:
        arguments: The command line without the program; None takes `sys.argv`.

    Returns:
        The exit code: 0 done, 1 fault, 2 invalid input.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _run(parser().parse_args(argv)), "--json" in argv)


def _run(args: argparse.Namespace) -> int:
    workers = args.workers if args.workers is not None else min(16, len(os.sched_getaffinity(0)))

    from skyrl_mega.export.source import check_output, find

    check_output(args.output)
    source = find(args.source, args.step, args.model)

    # torch is imported late, so that errors above appear at once.
    from skyrl_mega.export.export import BLOCK_FP8, export
    from skyrl_mega.export.job import DTYPES as TYPES
    from skyrl_mega.export.pool import WorkerDied
    from skyrl_mega.export.progress import Progress, size
    from skyrl_mega.export.work import ExportMismatch

    people = sys.stderr if args.json else sys.stdout
    print(f"{source.folder} → {args.output}, {workers} {'worker' if workers == 1 else 'workers'}", file=people)
    try:
        done = export(
            source,
            args.output,
            dtype=TYPES.get(args.dtype),
            fp8=args.dtype == BLOCK_FP8,
            origin=args.origin,
            workers=workers,
            file_bytes=int(args.shard_gib * 2**30),
            verify=args.verify,
            progress=Progress(people),
        )
    except (ExportMismatch, WorkerDied, OSError) as error:
        print(f"fault: {error}", file=sys.stderr)
        return FAULT
    if done.without_master:
        keys = ", ".join(done.without_master[:3]) + (" …" if len(done.without_master) > 3 else "")
        print(
            f"{len(done.without_master)} tensors are not trained and have no float32 master copy; their weights are "
            f"exported instead: {keys}",
            file=people,
        )
    if done.copied:
        print(
            f"{done.copied} tensors ({size(done.copied_bytes)}) of no layer are copied from {source.model}", file=people
        )
    if args.json:
        print(json.dumps(asdict(done)))
        return DONE
    files = "1 file" if done.files == 1 else f"{done.files} files"
    rate = f"{size(done.nbytes / done.seconds)}/s"
    print(f"{done.output}: {done.tensors} tensors in {files}, {done.dtype}")
    print(f"  {size(done.nbytes)} in {done.seconds:.1f} s, {rate}")
    print(f"  {'read back and equal, bit by bit' if done.verified else 'not read back (--verify does)'}")
    return DONE
