"""The live page of a run of another command, or of a finished run: `report run RUN --serve PORT`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from skyrl_mega.report import run_data
from skyrl_mega.report.live.access import FILE, token_of
from skyrl_mega.report.live.process import address, bound
from skyrl_mega.report.live.server import serve, yield_to_the_run
from skyrl_mega.report.live.snapshot import Follower
from skyrl_mega.telemetry.run_dir import is_at_work


def serve_until_interrupted(folder: Path, host: str, port: int) -> None:
    """Serves the live page of a run in this process until Ctrl-C or SIGTERM; prints the address.

    On a terminal the printed address contains the token. Lowers the priority of this process.

    Args:
        folder: The run's folder.
        host: Address or name of this machine to bind.
        port: Port to bind; 0 takes a free one.

    Raises:
        UserError: The folder does not belong to a run, the address cannot be bound (a busy port is not waited for), or
            the token cannot be stored.
    """
    run_data.read(folder)
    token = token_of(folder)
    with bound(host, port, keys=("--host", "--serve")) as listening:
        yield_to_the_run()
        url = address(host, listening)
        # Other people may read a file or a pipe.
        shown = f"{url}/?token={token}" if sys.stdout.isatty() else f"{url}, with the token in {folder / FILE}"
        print(f"{shown}\nCtrl-C ends the page", flush=True)
        try:
            asyncio.run(serve(listening, Follower(folder, lambda: is_at_work(folder)), token))
        except KeyboardInterrupt:
            return
