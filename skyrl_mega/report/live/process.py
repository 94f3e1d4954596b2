"""The driver's side of the live page: port, token, start and end of the serving process."""

from __future__ import annotations

import errno
import ipaddress
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import TelemetryConfig
from skyrl_mega.report.live.access import FILE, token_of
from skyrl_mega.telemetry.console import Console

BIND_S = 5.0
"""Seconds to wait for a port; the page of a killed run needs a moment to end."""
STOP_S = 8.0
"""Time limit in seconds for the end of the process."""


@contextmanager
def live_page(config: TelemetryConfig, folder: Path, console: Console) -> Iterator[None]:
    """Serves the live page of a run, in a process of its own, for the duration of the block. At the end viewers may
    fetch the last state; waits at most `STOP_S` seconds for the end of the process, then kills it.

    Does nothing without `telemetry.page`. If the port is busy, or the token cannot be stored, only prints a note, so
    that a resumed run continues. The serving process also ends if this process is killed, because it waits on a pipe
    from this process.

    Args:
        config: Port and address.
        folder: The run's folder.
        console: Shows the address of the page.

    Raises:
        OSError: `logs/page.log` or the run's log cannot be written, or the process cannot be started.
    """
    process = None if config.page is None else _started(config.page_host, config.page, folder, console)
    if process is None:
        yield
        return
    assert process.stdin is not None
    try:
        yield
    except Exception:
        _announce_end(process)
        raise
    else:
        _announce_end(process)
    finally:  # without an announcement, after a signal: the page ends at once
        with suppress(OSError):  # the page has ended already
            process.stdin.close()
        _wait(process)


def _started(host: str, port: int, folder: Path, console: Console) -> subprocess.Popen[bytes] | None:
    try:
        token = token_of(folder)
        listening = bound(host, port, BIND_S)
    except UserError as error:
        console.say(f"note: no live page: {error}; the run continues without it")
        return None
    with listening, (folder / "logs" / "page.log").open("ab") as log:
        url = address(host, listening)
        descriptor = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_mega.report.live.server", str(folder), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(descriptor,),
            start_new_session=True,  # Ctrl-C ends the run, and the run ends the page
        )
    assert process.stdin is not None
    with suppress(OSError):  # the page ended at once; its log says why
        process.stdin.write(f"{token}\n".encode())
        process.stdin.flush()
    console.show_secret(f"live page: {url}/?token={token}", f"live page: {url}, with the token in {folder / FILE}")
    if not is_loopback(host):
        console.say(f"note: telemetry.page_host={host}: the page and its token cross the network without encryption")
    return process


def bound(
    host: str,
    port: int,
    patience_s: float = 0.0,
    *,
    keys: tuple[str, str] = ("telemetry.page_host", "telemetry.page"),
) -> socket.socket:
    """Returns a TCP socket bound to an address and listening; the caller closes the socket.

    Args:
        host: Address or name of this machine.
        port: Port; 0 takes a free one.
        patience_s: Seconds to wait for a port in use.
        keys: Names of the user's settings for host and port, for errors.

    Raises:
        UserError: The port is still in use after `patience_s`; or, raised without waiting, the address is not of this
            machine or the port is not allowed.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, socket.SOCK_STREAM)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(place)
                listening.listen(128)
            except OSError:
                listening.close()
                raise
            return listening
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                problem, fix = f"this machine has no such address ({error.strerror})", "give 127.0.0.1 or 0.0.0.0"
                raise UserError(problem, key=keys[0], value=host, fix=fix) from error
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                fix = "give a free port from 1024 on, or 0 for any"
                raise UserError(f"{error.strerror} on {host}", key=keys[1], value=port, fix=fix) from error
            time.sleep(0.2)


def address(host: str, listening: socket.socket) -> str:
    """Returns the URL of a page, without the token and without a `/` at the end; for a socket on all interfaces, with
    the name of this machine.

    Args:
        host: Address to which the socket is bound.
        listening: The bound socket; gives the port.
    """
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Returns True for `localhost` and loopback addresses, which only this machine reaches; False for other hosts."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _announce_end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # the page has ended already
        process.stdin.write(b"\n")
        process.stdin.flush()


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
