"""Runs a function on n real processes, forked from a server that has imported torch and megatron-core already."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
    """`function(rank, address, *args)` in `ranks` processes; their results in order. The first failure is raised."""
    address = f"127.0.0.1:{free_port()}"
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_main, args=(theirs, function, rank, address, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        waiting = dict(enumerate(pipes))
        results: dict[int, Any] = {}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout)
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting)} did not answer in {timeout} s")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    try:
                        ok, value = pipe.recv()
                    except EOFError:
                        ok, value = False, "ended without an answer"
                    if not ok:
                        raise RuntimeError(f"rank {rank}: {value}")
                    results[rank] = value
                    del waiting[rank]
        return [results[r] for r in range(ranks)]
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def _main(pipe: Connection, function: Callable[..., Any], rank: int, address: str, args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(rank, address, *args)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        raise
