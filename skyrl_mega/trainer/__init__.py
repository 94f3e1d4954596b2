"""The RL loop and what turns trajectories into batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_mega.config.schema import Config

if TYPE_CHECKING:
    from skyrl_mega.telemetry.console import Console


def run(config: Config, folder: Path, console: Console) -> None:
    """Trains as `config` says and leaves everything in `folder`. The inputs have been checked.

    Raises:
        UserError: What only shows once the data and the model are read.
        ActorFailed: An actor died, raised or did not answer; names the first cause.
        Stopped: SIGUSR1 came.
    """
    from skyrl_mega.trainer.loop import train
    from skyrl_mega.trainer.setup import open_run
    from skyrl_mega.trainer.stop import Notice

    notice = Notice()
    with notice.listening(), open_run(config, folder, console, notice) as opened:
        train(opened)
        if config.checkpoint.export:
            with console.phase("export"):
                opened.policy.export(folder / "model", Path(config.model.path).absolute())
        console.summary(folder, opened.first_evaluation, opened.last_evaluation)
