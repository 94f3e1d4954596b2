"""Runs a function in n real processes, forked from a server after the imports of torch and megatron-core."""

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
MEGATRON = "NVTE_"
"""Prefix of environment variables that megatron-core sets for each model; another model must not see them."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(MEGATRON)}
"""The environment before any test: changes by the first test must not reach later ranks."""


class Server:
    """A fork server of its own: the default server of `multiprocessing` would have the imports needed by `export`.

    Args:
        preload: Module imported by the server before any fork.
        variables: Further environment variables of the server and its forks.
    """

    def __init__(self, preload: str, **variables: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload([preload])
        self._environment = ENVIRONMENT | variables

    def start(self, target: Callable[..., Any], args: tuple[Any, ...]) -> multiprocessing.process.BaseProcess:
        """Starts a process of the server."""
        with mock.patch.dict(os.environ, self._environment, clear=True):
            self._server.ensure_running()
        process = _context.Process(target=target, args=args)
        with mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
            process.start()
        return process


MEGATRON_SERVER = Server("tests.support.preload")
"""Server of ranks with torch and megatron-core, without Transformer Engine."""


def free_port() -> int:
    """Returns a free loopback port outside the ranges used by the kernel and Ray."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(s.getsockname()[1])


def run_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 400, server: Server = MEGATRON_SERVER
) -> list[Any]:
    """Runs `function(rank, address, *args)` in `ranks` processes; returns the results in order, or raises the first
    failure."""
    address = f"127.0.0.1:{free_port()}"
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = multiprocessing.Pipe()
        processes.append(server.start(_main, (theirs, function, rank, address, args)))
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
    """Sends a plain pickle: a pipe would share tensors in memory that ends with this process."""
    pipe.send_bytes(pickle.dumps((ok, value)))
