"""Trains from a configuration: opens the run, runs the loop, and restarts the run after a fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_mega.config.schema import Config

if TYPE_CHECKING:
    from skyrl_mega.telemetry.console import Console
    from skyrl_mega.trainer.run import Run


def train(config: Config, folder: Path, console: Console) -> None:
    """Runs the training that `config` describes and writes all results to `folder`. Expects checked inputs. The folder
    exists; with a checkpoint in it the run resumes.

    The run itself survives engine failures. After any other ActorFailed or ClusterError everything is torn down and
    restarted from the newest checkpoint, at most `run.restarts` times. Before the first completed step only a lost node
    leads to a restart: any other early fault would repeat. Missing nodes and all other errors never lead to a restart.

    Raises:
        UserError: A fault of the inputs appeared only after reading data and model, or an existing file or folder must
            not be replaced.
        ActorFailed, ClusterError: An actor died, raised or did not answer, or missing nodes did not join. Names the
            root cause.
        Stopped: A signal arrived.
        CannotLearn: The policy learned nothing from the last `run.patience` steps.
        EngineDiffers: Engine and policy differ by more than `health.mismatch` allows.
        StaleTooFar: A token is older than `asynchrony.max_staleness` allows.
        WrongRoutes: Expert routes are missing or do not match the tokens.
        OSError: A file of the run could not be written.
    """
    from skyrl_mega.cluster.atomic_output import refuse_folder
    from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing, fault_event
    from skyrl_mega.hf_checkpoint.load import exported
    from skyrl_mega.telemetry.events import Event
    from skyrl_mega.trainer.checkpoints import refuse_unusable
    from skyrl_mega.trainer.setup import open_run
    from skyrl_mega.trainer.shutdown import ShutdownRequest

    refuse_unusable(folder / "checkpoints")
    if config.checkpoint.export:
        refuse_folder(folder / "model", f"checkpoint.export = true: {folder / 'model'}", exported)
    restarts_left = config.run.restarts
    any_step_done = False
    while True:
        try:
            with open_run(config, folder, console) as run:
                step_before = run.step
                try:
                    finish(run)
                finally:
                    any_step_done = any_step_done or run.step > step_before
            return
        except (ActorFailed, ClusterError) as error:
            ShutdownRequest().raise_if_requested()  # a signal to all processes also fails the actors
            if (
                not restarts_left
                or isinstance(error, NodesMissing)
                or not (any_step_done or isinstance(error, NodeLost))
            ):
                raise
            restarts_left -= 1
            console.say(fault_event(error))
            text = f"restarting the run from its newest checkpoint ({restarts_left} restarts left)"
            console.say(Event("restart", text, restarts_left=restarts_left))


def finish(run: Run) -> None:
    """Runs the remaining steps, exports the model to `<run folder>/model` with `checkpoint.export`, writes the report
    page and prints the summary. An engine failure before the export is only printed.

    Raises:
        GracefulStop, Stopped: A signal arrived.
        CannotLearn: The policy learned nothing from the last `run.patience` steps.
        EngineDiffers: Engine and policy differ by more than `health.mismatch` allows.
        StaleTooFar: A token is older than `asynchrony.max_staleness` allows.
        WrongRoutes: Expert routes are missing or do not match the tokens.
        ActorFailed, ClusterError: A rank failed, no engine or rollout worker is left, or arrays were lost.
        UserError: Too many environments failed, or the function of `run.loop` is wrong.
        OSError: A file of the run, or the export, could not be written.
    """
    from skyrl_mega.cluster.errors import ActorFailed
    from skyrl_mega.report.overview import write_at_end
    from skyrl_mega.trainer import loop

    loop.train(run)
    if run.config.checkpoint.export:
        try:
            run.residency.enter("logprobs")
        except ActorFailed as error:
            engines = run.sync.fleet.group
            if error.group != engines.name:
                raise
            run.console.say(f"note: the export continues without engines, which are not needed any more: {error}")
            engines.shutdown()
        with run.console.phase("export"):
            run.policy.export(run.folder / "model", Path(run.config.model.path).absolute())
    write_at_end(run.folder, run.console.say)
    run.console.summary(run.folder, run.first_evaluation, run.last_evaluation)
