"""A run's own retrieval service: ready before the run begins, restarted after a crash, ended with the run."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.retriever.client import TOKEN_VARIABLE
from skyrl_mega.retriever.commands import build_index
from skyrl_mega.telemetry.events import Event

LOOPBACK = "127.0.0.1"
START_S = 600.0
"""Time limit in seconds for the start; loading the index of a large corpus takes minutes."""
STOP_S = 15.0
"""Time limit in seconds for the end; afterwards the service is killed."""
RESTARTS = 10
"""Restart budget. After that the service stays down: searches fail, and the policy sees the failures."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks at the process."""


@contextmanager
def running_service(
    config: EnvironmentConfig, logs: Path, say: Callable[[str], None] = print, host: str = LOOPBACK
) -> Iterator[EnvironmentConfig]:
    """Starts a retrieval service if `retriever.index` is set, and yields the settings with `retriever.url` filled in.

    Without an index, or with a URL, yields the unchanged settings and starts nothing. With `retriever.build`, the index
    is built first if it is not up to date. The service ends with this block, and also if this process is killed: the
    service reads a pipe held by this process alone. Inside the block, this process's environment variable
    `retriever.token_variable` holds the service's token, a new one unless it was set.

    Args:
        config: Settings of environments.
        logs: Folder for `retriever.log`.
        say: Receives lines about the progress.
        host: Address to bind.

    Raises:
        UserError: The index cannot be built or served.
        OSError: The index or the log cannot be written.
    """
    retriever = config.retriever
    if retriever.url or not retriever.index:
        yield config
        return
    index = Path(retriever.index).absolute()
    if retriever.build is not None:
        try:
            build_index(shlex.split(retriever.build), index, lambda line: say(f"retriever: {line}"))
        except UserError as error:
            raise UserError(error, key="environment.retriever.build") from error
    logs.mkdir(parents=True, exist_ok=True)
    with _token_in(retriever.token_variable):
        service = RetrieverProcess(
            index, shlex.split(retriever.serve), logs / "retriever.log", retriever.token_variable, say, host
        )
        try:
            url = service.start()
            yield replace(config, retriever=replace(retriever, url=url))
        finally:
            service.stop()


@contextmanager
def _token_in(variable: str) -> Iterator[None]:
    """Sets a token in this process's environment: without a token the service would answer every user of this
    machine."""
    if os.environ.get(variable):
        yield
        return
    os.environ[variable] = secrets.token_urlsafe(32)
    try:
        yield
    finally:
        del os.environ[variable]


class RetrieverProcess:
    """A service in a separate process, with a thread that restarts it on the same port.

    Args:
        index: Index folder.
        options: Further arguments of `serve`.
        log: Log file; while the service is ready, a `.json` file of the same name holds its address.
        token_variable: Name of the environment variable with the token, if any.
        say: Receives a line after each restart.
        host: Address to bind.
    """

    def __init__(
        self,
        index: Path,
        options: list[str],
        log: Path,
        token_variable: str,
        say: Callable[[str], None],
        host: str = LOOPBACK,
    ) -> None:
        self.index, self.options, self.log, self.say, self.host = index, options, log, say, host
        self.env = {**os.environ, TOKEN_VARIABLE: os.environ.get(token_variable, "")}
        self.process: subprocess.Popen[bytes] | None = None
        self._ready = log.with_suffix(".json")
        self._ending = threading.Event()
        self._watch = threading.Thread(target=self._keep, name="retriever", daemon=True)

    def start(self) -> str:
        """Starts the service, waits until the service is ready, and returns its URL. Call `stop` at the end, also after
        an error here.

        A thread restarts the service after a crash, at most `RESTARTS` times in all.

        Raises:
            UserError: The service ended, or was not ready within 600 s.
            OSError: The log cannot be written.
        """
        self._ready.unlink(missing_ok=True)  # left by a killed service
        self._spawn(0)
        end = time.monotonic() + START_S
        while not self._ready.is_file():
            assert self.process is not None
            if self.process.poll() is not None:
                lines = self.log.read_text(errors="replace").strip().splitlines() or ["without output"]
                raise UserError(
                    f"the service ended during its start ({lines[-1]}); see {self.log}", key="environment.retriever"
                )
            if time.monotonic() > end:
                raise UserError(
                    f"the service was not ready in {START_S:g} s; see {self.log}", key="environment.retriever"
                )
            time.sleep(LOOK_EVERY_S)
        url = str(json.loads(self._ready.read_text(encoding="utf-8"))["url"])
        self._port = int(url.rpartition(":")[2])
        self._watch.start()
        return url

    def stop(self) -> None:
        """Ends the service: it answers accepted requests first, and is killed after 15 seconds. Also ends the thread of
        restarts; does nothing before `start`."""
        self._ending.set()
        if self._watch.is_alive():
            self._watch.join()
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _spawn(self, port: int) -> None:
        command = [sys.executable, "-m", "skyrl_mega.retriever", "serve", "--index", str(self.index), *self.options]
        command += ["--host", self.host, "--port", str(port), "--ready-file", str(self._ready), "--with-stdin"]
        with self.log.open("ab") as out:
            # A separate session: Ctrl-C in the terminal ends the run, and the run ends the service.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=self.env, start_new_session=True
            )

    def _keep(self) -> None:
        restarts = 0
        while not self._ending.wait(LOOK_EVERY_S):
            assert self.process is not None and self.process.stdin is not None
            code = self.process.poll()
            if code is None:
                continue
            self.process.stdin.close()
            if restarts == RESTARTS:
                text = (
                    f"retriever: ended again ({code}) after {RESTARTS} restarts and stays down, so searches fail; see "
                    f"{self.log}"
                )
                self.say(Event("retriever_lost", text, code=code, restarted=False))
                return
            restarts += 1
            text = f"retriever: ended ({code}); restarting it"
            self.say(Event("retriever_lost", text, code=code, restarted=True))
            self._spawn(self._port)
