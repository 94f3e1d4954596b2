"""Command line of a preflight, and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, FAULT, Parser, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.preflight`: checks every node of the cluster and prints the report.

    Args:
        arguments: The command line without the program; None takes `sys.argv`.

    Returns:
        The exit code: 0 all nodes are fit, 1 a node is unfit or the cluster cannot be reached, 2 invalid input.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    p = Parser(
        prog="python -m skyrl_mega.preflight",
        description="Looks at every node of the cluster that RAY_ADDRESS names (without it, at this machine) before a "
        "run. Exit codes: 0 all are fit, 1 some are not and are named, 2 the input is wrong.",
        allow_abbrev=False,
    )
    p.add_run()
    p.add_argument("--json", action="store_true", help="the report as one JSON object on standard output")
    return guarded(lambda: _run(p.parse_intermixed_args(argv)), "--json" in argv)


def _run(args: argparse.Namespace) -> int:
    from skyrl_mega.config.checks import check
    from skyrl_mega.config.compose import compose_run

    config = compose_run(args)
    check(config)

    from skyrl_mega.cluster.errors import ClusterError
    from skyrl_mega.cluster.ray_session import session
    from skyrl_mega.envs import registry
    from skyrl_mega.preflight import run_inputs
    from skyrl_mega.preflight.preflight import preflight

    registry.check(config.environment)
    run_inputs.check_present(config)
    model = Path(config.model.path)
    run_inputs.model_config(config)
    try:
        limit = config.cluster.start_timeout_s
        with _folder(Path(config.run.directory) / config.run.name) as folder, session(actors=1, timeout_s=limit):
            report = preflight(config, model, folder, _device(config.cluster.device))
    except ClusterError as error:
        print(f"fault: {error}", file=sys.stderr)
        return FAULT
    if args.json:
        print(json.dumps(report.values()))
    else:
        print(f"{report.table()}\n\n{report.summary()}")
    return FAULT if report.bad else DONE


def _device(wanted: str) -> str:
    """Returns the device of the run: CUDA at any sign of GPUs in the cluster.

    Signs on this machine count only without another cluster, except GPUs assigned by Slurm, which belong to a node of
    the cluster.
    """
    if wanted != "auto":
        return wanted
    import ray

    from skyrl_mega.cluster.devices import gpu_evidence, torch_view

    here = gpu_evidence()
    gpus_found = here.slurm if os.environ.get("RAY_ADDRESS") else here or torch_view().sees
    return "cuda" if ray.cluster_resources().get("GPU") or gpus_found else "cpu"


@contextlib.contextmanager
def _folder(run: Path) -> Iterator[Path]:
    """Yields the run's folder; folders created for the preflight are removed again."""
    created = [p for p in (run, *run.parents) if not p.exists()]
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{run} cannot be made: {error.strerror}; allowed is a folder that you may write to", key="run.directory"
        ) from error
    try:
        yield run
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # a run may have started in the folder meanwhile
                folder.rmdir()
