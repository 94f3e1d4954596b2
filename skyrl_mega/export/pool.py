"""Worker processes: run a method on many items, each process with its own `ExportWorker`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.export.job import ExportJob
from skyrl_mega.export.work import ExportWorker

AHEAD = 4
"""Items queued for each worker."""

_context = multiprocessing.get_context("forkserver")
_worker: ExportWorker | None = None


class WorkerDied(RuntimeError):
    """Error for a worker process of an export that ended without a result."""


def run(job: ExportJob, folder: Path, method: str, items: Sequence[int], workers: int) -> Iterator[tuple[int, Any]]:
    """Runs `ExportWorker(job, folder).method(item)` for all items; yields (item, answer) in order of completion. Work
    starts, and errors occur, during iteration.

    Args:
        job: The plan, given to every worker.
        folder: Folder of the files being written.
        method: Name of a method of `ExportWorker`.
        items: Arguments of the method; at least one.
        workers: Number of processes; with 1, or a single item, the calling process does the work.

    Raises:
        WorkerDied: A process ended by itself or was killed.
        Exception: The first error raised by a worker.
    """
    if workers == 1 or len(items) == 1:
        alone = ExportWorker(job, folder)
        yield from ((item, getattr(alone, method)(item)) for item in items)
        return
    count = min(workers, len(items))
    _context.set_forkserver_preload(["skyrl_mega.export.work"])
    pool = ProcessPoolExecutor(count, mp_context=_context, initializer=_start_worker, initargs=(job, folder))
    try:
        waiting: dict[Future[Any], int] = {}
        rest = iter(items)
        while True:
            while len(waiting) < count * AHEAD and (item := next(rest, None)) is not None:
                waiting[pool.submit(_call, method, item)] = item
            if not waiting:
                return
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(done), done.result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            f"a worker process died in the phase {method}; if the kernel killed the process for lack of memory, give "
            "fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(job: ExportJob, folder: Path) -> None:
    """Starts a worker process. The process ignores interrupts and ends with its parent."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = ExportWorker(job, folder)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(method: str, item: int) -> Any:
    return getattr(_worker, method)(item)
