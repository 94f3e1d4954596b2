"""Trains from a configuration: opens the run, runs the loop, and starts again after a fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_mega.config.schema import Config

if TYPE_CHECKING:
    from skyrl_mega.telemetry.console import Console
    from skyrl_mega.trainer.run import Run


def train(config: Config, folder: Path, console: Console) -> None:
    """Trains as `config` says and leaves everything in `folder`. The inputs have been checked.

    What its engines survive it goes on through. After any other fault it is taken down and starts again from its
    newest checkpoint, `run.restarts` times at most. Before a step has been completed it does so only where a node is
    lost: what has not worked for another reason is not tried again.

    Raises:
        UserError: What only shows once the data and the model are read.
        ActorFailed, ClusterError: An actor died, raised or did not answer, or nodes that were waited for did not come;
            names the root cause.
        Stopped: A signal came.
    """
    from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing
    from skyrl_mega.cluster.whole import refuse_folder
    from skyrl_mega.hf_checkpoint.load import exported
    from skyrl_mega.trainer.checkpoints import refuse_unusable
    from skyrl_mega.trainer.setup import open_run
    from skyrl_mega.trainer.shutdown import ShutdownRequest

    refuse_unusable(folder / "checkpoints")
    if config.checkpoint.export:
        refuse_folder(folder / "model", f"checkpoint.export = true: {folder / 'model'}", exported)
    left = config.run.restarts
    worked = False
    while True:
        try:
            with open_run(config, folder, console) as opened:
                before = opened.step
                try:
                    finish(opened)
                finally:
                    worked = worked or opened.step > before
            return
        except (ActorFailed, ClusterError) as error:
            ShutdownRequest().look()  # a signal that everything had is the cause then
            if not left or isinstance(error, NodesMissing) or not (worked or isinstance(error, NodeLost)):
                raise
            left -= 1
            console.say(f"fault: {error}")
            console.say(f"the run starts again from its newest checkpoint ({left} restarts are left)")


def finish(run: Run) -> None:
    """All steps that are left, and what comes after them."""
    from skyrl_mega.cluster.errors import ActorFailed
    from skyrl_mega.report.overview import write_at_end
    from skyrl_mega.trainer import loop

    loop.train(run)
    if run.config.checkpoint.export:
        try:
            run.residency.enter("logprobs")
        except ActorFailed as error:
            engines = run.sync.fleet.group
            if error.actor.rpartition("-")[0] != engines.name:
                raise
            run.console.say(f"note: no engine is needed any more, and the export goes on without: {error}")
            engines.shutdown()
        with run.console.phase("export"):
            run.policy.export(run.folder / "model", Path(run.config.model.path).absolute())
    write_at_end(run.folder, run.console.say)
    run.console.summary(run.folder, run.first_evaluation, run.last_evaluation)
