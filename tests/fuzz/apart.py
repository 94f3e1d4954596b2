"""Feeding in a separate process: a crash, or a hang beyond the reach of signals, counts as a failed case."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from multiprocessing.connection import Connection

from tests.fuzz.feed import Began, Ended, Share, feed
from tests.fuzz.targets import TARGETS

START_S = 300.0
"""Seconds allowed for imports and the preparation of targets."""
PATIENCE_S = 30.0
"""Seconds beyond a target's limit; a longer silence means a hang outside Python."""
MEMORY = 16 * 2**30
"""Limit of the address space: a reader that needs more for a small file has failed."""


def feed_apart(names: Sequence[str], seed: int, had: Mapping[str, Share]) -> Generator[Began | Ended]:
    """Yields the events of `feed` from a child process, and restarts the process after it ended."""
    with tempfile.TemporaryDirectory(prefix="skyrl-fuzz-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)
        while True:
            yield from _one(names, seed, had, folder)


def _one(names: Sequence[str], seed: int, had: Mapping[str, Share], folder: str) -> Generator[Began | Ended]:
    """Yields the events of a process until the end."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, list(names), seed, dict(had), folder), daemon=False)
    process.start()
    theirs.close()
    under_way: Began | None = None
    start = time.monotonic()
    try:
        while True:
            patience = TARGETS[under_way.name].bound_s + PATIENCE_S if under_way else START_S
            why = None if ours.poll(patience) else f"silent for {patience:g} s: it hangs where no signal reaches it"
            with contextlib.suppress(EOFError, ConnectionResetError):
                event = ours.recv() if why is None else None
                if event is not None:
                    under_way, start = (event, time.monotonic()) if isinstance(event, Began) else (None, start)
                    yield event
                    if isinstance(event, Ended):
                        ours.send("next")
                    continue
            break
        process.join(None if why is None else 0)
        if under_way is None:
            raise RuntimeError(why or f"the process ended between two cases, with exit code {process.exitcode}")
        why = why or f"it ended the process, with exit code {process.exitcode}"
        yield Ended(under_way.name, under_way.number, time.monotonic() - start, f"{why}\n")
    finally:
        ours.close()  # tells the child to end
        process.join(5.0 if under_way is None else 0.0)
        if process.is_alive():
            process.kill()
            process.join()


def _work(connection: Connection, names: Sequence[str], seed: int, had: dict[str, Share], folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # left to the parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with contextlib.closing(feed(names, seed, had)) as events:
        for event in events:
            connection.send(event)
            if isinstance(event, Ended):
                had[event.name].count(event)
                try:
                    connection.recv()
                except EOFError:
                    return
