"""Comparison of engine weights with policy weights, after starting both and synchronising twice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from skyrl_mega.cli import inputs, prepare
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.run_dir import run_folder
from skyrl_mega.trainer.setup import open_run
from skyrl_mega.weights.sync import WeightComparison

if TYPE_CHECKING:
    from skyrl_mega.trainer.run import Run


def compare(file: str, overrides: Sequence[str], *, as_json: bool = False) -> list[WeightComparison]:
    """Starts policy and engines like the run of a configuration file, from `model.path` and without training, and
    compares their weights.

    Args:
        file: Configuration file of the run.
        overrides: `group.key=value` arguments.
        as_json: Print nothing on standard output; progress goes to standard error.

    Returns:
        One entry per engine worker.

    Raises:
        UserError: The settings are wrong.
        ActorFailed: An actor died, raised or did not answer; names the root cause.
        ClusterError: Ray did not start, or lacks the GPUs.
        InfrastructureFault, pyarrow.ArrowException: `data.prepare`, run for absent data, failed.
    """
    with opened(file, overrides, as_json=as_json) as run:
        run.residency.enter("train")  # so that engines have slept before the comparison
        with run.console.phase("second sync"):
            run.sync_engines()
        run.residency.enter("sync")
        with run.console.phase("compare"):
            return run.sync.check()


@contextmanager
def opened(file: str, overrides: Sequence[str], *, as_json: bool) -> Iterator[Run]:
    """Starts policy and engines like a run, with the weights of `model.path`, and yields the run; ends it afterwards.

    Uses a temporary run folder, without trackers, warm-up, resume or asynchrony.

    Args:
        file: Configuration file of the run.
        overrides: `group.key=value` arguments.
        as_json: True to print nothing on standard output.

    Raises:
        UserError: The settings are wrong.
        ActorFailed: An actor did not start.
        ClusterError: Ray did not start, or lacks the GPUs.
        InfrastructureFault, pyarrow.ArrowException: `data.prepare`, run for absent data, failed.
    """
    with tempfile.TemporaryDirectory(prefix="weights-check-") as directory:
        fixed_settings = [
            f"run.directory={directory}",
            "warmup.steps=0",
            "checkpoint.resume=false",
            "telemetry.trackers=[]",
        ]
        fixed_settings += ["asynchrony.mode=off", "asynchrony.max_staleness=0"]
        config = compose(file, [*overrides, *fixed_settings])
        check(config)
        inputs.check_inputs(config)
        with Console(as_json=as_json) as console, run_folder(config, console.say) as folder:
            config = prepare.prepare(config, console)
            with open_run(config, folder, console) as run:
                yield run


def table(compared: Sequence[WeightComparison]) -> str:
    """Returns the comparison as text: a line per engine worker, then a line per differing parameter. Never empty: the
    first line is a head."""
    lines = [f"{'engine':>6} {'worker':>6} {'parameters':>10} {'bytes':>16} {'different':>9}"]
    lines += [f"{c.engine:6} {c.worker:6} {c.parameters:10} {c.bytes:16,} {len(c.different):9}" for c in compared]
    for c in compared:
        lines += [f"different: engine {c.engine} worker {c.worker}: {name}" for name in c.different]
    return "\n".join(lines)
