"""Runs a function on n real processes, forked from a server that has imported torch and megatron-core already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import socket
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

_context = multiprocessing.get_context("forkserver")
_server = forkserver.ForkServer()  # of its own: what a process forks from otherwise has imported what `export` needs
_server.set_forkserver_preload(["tests.support.preload"])
MEGATRON = "NVTE_"
"""How variables begin that megatron-core sets for each model that it builds, and another model may not find."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(MEGATRON)}
"""As it is before any test: what the test that comes first has set for itself is not for all ranks after it."""


def start_rank(target: Callable[..., Any], args: tuple[Any, ...]) -> multiprocessing.process.BaseProcess:
    """A process of the fork server."""
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        _server.ensure_running()
    process = _context.Process(target=target, args=args)
    with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
        process.start()
    return process


def free_port() -> int:
    """A loopback port that is free now, and not one that the kernel or Ray gives to whoever comes meanwhile."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(s.getsockname()[1])


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
    """`function(rank, address, *args)` in `ranks` processes; their results in order. The first failure is raised."""
    address = f"127.0.0.1:{free_port()}"
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = multiprocessing.Pipe()
        processes.append(start_rank(_main, (theirs, function, rank, address, args)))
        theirs.close()
        pipes.append(ours)
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
                        ok, value = pickle.loads(pipe.recv_bytes())
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
        _answer(pipe, True, function(rank, address, *args))
    except Exception:
        _answer(pipe, False, traceback.format_exc())
        raise


def _answer(pipe: Connection, ok: bool, value: Any) -> None:
    """Pickled plainly: a pipe would hand over tensors in memory that ends with this process."""
    pipe.send_bytes(pickle.dumps((ok, value)))
