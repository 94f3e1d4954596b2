"""Clients with unfinished requests: short use of resources, and access for all other clients."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from skyrl_mega.retriever import connections
from skyrl_mega.retriever.connections import TimeLimitedProtocol

LIMIT_S = 1.0


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connections, "RECEIVE_S", LIMIT_S)
    monkeypatch.setattr(connections, "CONNECTIONS", 8)
    server = uvicorn.Server(uvicorn.Config(_app, http=TimeLimitedProtocol, lifespan="off", log_level="error"))
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(60)


def begun(port: int, data: bytes) -> socket.socket:
    held = socket.create_connection(("127.0.0.1", port), timeout=60)
    held.sendall(data)
    return held


def closed_within(held: socket.socket, seconds: float) -> bool:
    held.settimeout(seconds)
    try:
        return held.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def get(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/", trust_env=False, timeout=60).text


def test_half_sent_headers(port: int) -> None:
    start = time.monotonic()
    held = [begun(port, b"GET / HTTP/1.1\r\nHost: x\r\n") for _ in range(60)]
    assert get(port) == "ok" and time.monotonic() - start < 60
    assert all(closed_within(one, 30 * LIMIT_S) for one in held)
    assert get(port) == "ok"
    while (
        TimeLimitedProtocol.waiting and time.monotonic() < start + 90
    ):  # the client's own, until the service learns of its end
        time.sleep(0.01)
    assert not TimeLimitedProtocol.waiting


@pytest.mark.parametrize("data", [b"", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab"])
def test_nothing_and_half_a_body(port: int, data: bytes) -> None:
    assert closed_within(begun(port, data), 30 * LIMIT_S)


def test_a_byte_from_time_to_time_gives_no_more_time(port: int) -> None:
    held, start = begun(port, b"GET / HTTP/1.1\r\n"), time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < start + 30 * LIMIT_S:
            held.sendall(b"a")
            time.sleep(0.1)
    assert time.monotonic() - start < 30 * LIMIT_S


def test_a_connection_that_is_kept_goes_on(port: int) -> None:
    with httpx.Client(trust_env=False) as client:
        for _ in range(3):
            assert client.get(f"http://127.0.0.1:{port}/").text == "ok"
            time.sleep(0.6 * LIMIT_S)


def test_connections_that_are_kept_and_say_no_more_keep_nobody_out(port: int) -> None:
    held = [begun(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(8)]
    assert all(b"200 OK" in one.recv(1000) for one in held)
    assert get(port) == "ok"
    # The longest idle connection was closed to make room; the others continue.
    assert closed_within(held[0], 30) and not closed_within(held[-1], 0.1)
    for one in held:
        one.close()


def test_long_headers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends long headers: the size closes the connection, not the time."""
    monkeypatch.setattr(connections, "RECEIVE_S", 600.0)
    held = begun(port, b"GET / HTTP/1.1\r\nX: " + b"a" * 2**19)
    assert closed_within(held, 60)
