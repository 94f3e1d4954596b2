"""The server: keys, ends of sessions, clients that go, refused bodies, further sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.retriever import connections
from skyrl_mega.rollout.endpoint import app, door
from skyrl_mega.rollout.endpoint.requests import EndpointSession, SessionEnded
from skyrl_mega.rollout.endpoint.server import EndpointServer, server
from tests.rollout.endpoint.fakes import ScriptedSession, running_loop

Opened = Callable[[EndpointSession], AgentEndpoint]
BODY: Any = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def post(endpoint: AgentEndpoint, body: Any = BODY, path: str = CHAT, key: str | None = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"authorization": f"Bearer {endpoint.key if key is None else key}"}
    return httpx.post(endpoint.url + path, content=content, headers=headers, timeout=60)


def http(path: str = CHAT, **further: Any) -> str:
    """Returns the text of a request; `KEY` stands for the key."""
    body = json.dumps({**further, **BODY})
    return f"POST {path} HTTP/1.1\nHost: x\nAuthorization: Bearer KEY\nContent-Length: {len(body)}\n\n{body}"


def raw(endpoint: AgentEndpoint, text: str) -> socket.socket:
    """Returns a connection on which the text was sent."""
    port = int(endpoint.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(text.replace("\n", "\r\n").replace("KEY", endpoint.key).encode())
    return connection


def post_until_refused(endpoint: AgentEndpoint) -> None:
    """Posts until no server listens; until then the key is refused."""
    while True:
        assert post(endpoint).status_code == 401


def test_only_the_key_of_the_trajectory_is_admitted(opened: Opened, endpoint_server: EndpointServer) -> None:
    session, other = ScriptedSession(), ScriptedSession()
    endpoint, other_endpoint = opened(session), opened(other)
    assert endpoint.url == other_endpoint.url and endpoint.url.startswith("http://127.0.0.1:")
    assert endpoint.key != other_endpoint.key and endpoint.key not in repr(endpoint)
    for key in ("x", endpoint.key[:-1], endpoint.key + "x", endpoint.key.upper(), "\u00fc"):
        headers = {"authorization": f"Bearer {key}".encode("latin-1")}
        assert httpx.post(endpoint.url + CHAT, json=BODY, headers=headers).status_code == 401
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": endpoint.key}, {"x-api-key": "Bearer"}):
        assert httpx.post(endpoint.url + CHAT, json=BODY, headers=headers).status_code == 401
    assert httpx.post(endpoint.url + CHAT, json=BODY, headers={"x-api-key": endpoint.key}).status_code == 200
    assert post(endpoint).status_code == 200
    assert len(session.requests) == 2 and not other.requests
    endpoint_server.close(endpoint)
    assert post(endpoint).status_code == 401 and post(other_endpoint).status_code == 200
    endpoint_server.close(endpoint)
    assert len(session.requests) == 2


def test_a_key_of_ones_own(endpoint_server: EndpointServer, rollouts: asyncio.AbstractEventLoop) -> None:
    endpoint = endpoint_server.open(ScriptedSession(), rollouts, key="mine")
    assert endpoint.key == "mine" and post(endpoint).status_code == 200
    endpoint_server.close(endpoint)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_session_ends_its_requests(opened: Opened, endpoint_server: EndpointServer, stream: bool) -> None:
    session = ScriptedSession(held=True)
    endpoint = opened(session)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(endpoint, BODY | {"stream": stream})))
    thread.start()
    assert session.started.acquire(timeout=60)
    endpoint_server.close(endpoint)
    thread.join(60)
    assert answers[0].status_code == 401 and "has ended" in answers[0].json()["error"]["message"]
    assert session.ended.acquire(timeout=60) and session.cancelled == 1


def test_no_request_starts_after_close_in_the_loop_of_the_rollouts(rollouts: asyncio.AbstractEventLoop) -> None:
    session = ScriptedSession()
    entrance = door.AgentDoor(session, rollouts)

    async def submit_and_close() -> Any:
        future = entrance.submit(app.CHAT.read(BODY))  # starts with the next turn of the loop
        entrance.close()
        await asyncio.sleep(0)
        return future

    future = asyncio.run_coroutine_threadsafe(submit_and_close(), rollouts).result(60)
    assert future.cancelled() and not session.requests
    with pytest.raises(SessionEnded):
        door.result_of(asyncio.run(_settled(entrance)))


async def _settled(entrance: door.AgentDoor) -> asyncio.Future[Any]:
    future = asyncio.wrap_future(entrance.submit(app.CHAT.read(BODY)))
    await asyncio.wait([future])
    return future


def test_a_closed_loop_is_the_end_of_the_session(endpoint_server: EndpointServer) -> None:
    with running_loop() as loop:
        endpoint = endpoint_server.open(ScriptedSession(), loop)
        assert post(endpoint).status_code == 200
    assert post(endpoint).status_code == 401
    endpoint_server.close(endpoint)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_cancels_its_request(opened: Opened, stream: bool) -> None:
    session = ScriptedSession(held=True)
    with raw(opened(session), http(stream=stream)):
        assert session.started.acquire(timeout=60)
    assert session.ended.acquire(timeout=60) and session.cancelled == 1


def test_a_connection_serves_several_requests(opened: Opened) -> None:
    endpoint = opened(ScriptedSession())
    with httpx.Client(base_url=endpoint.url, headers={"x-api-key": endpoint.key}) as client:
        statuses = [client.post(CHAT, json=BODY).status_code, client.post("/nowhere", json=BODY).status_code]
        statuses += [client.post(CHAT, content=b"{").status_code, client.post(CHAT, json=BODY).status_code]
        assert statuses == [200, 404, 400, 200]


REFUSED: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/completions", BODY, 404),
    ("GET", CHAT, None, 405),
    ("POST", "/v1/models", BODY, 405),
    ("POST", CHAT, b"\xff", 400),
    ("POST", CHAT, b"[]", 400),
    ("POST", CHAT, b"", 400),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ("POST", CHAT, b"[" * 200 + b"]" * 200, 400),
    ("POST", CHAT, BODY | {"stream": "yes"}, 400),
]


@pytest.mark.parametrize("method, path, body, status", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused_requests(opened: Opened, method: str, path: str, body: Any, status: int) -> None:
    session = ScriptedSession()
    endpoint = opened(session)
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"authorization": f"Bearer {endpoint.key}"}
    answer = httpx.request(method, endpoint.url + path, content=content, headers=headers)
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false" and not session.requests


def test_an_oversized_body_is_refused_whole(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", 100_000)
    session = ScriptedSession()
    endpoint = opened(session)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()
    assert post(endpoint, body).status_code == 413
    chunked = (body[start : start + 65_536] for start in range(0, len(body), 65_536))
    headers = {"authorization": f"Bearer {endpoint.key}"}
    assert httpx.post(endpoint.url + CHAT, content=chunked, headers=headers, timeout=60).status_code == 413
    assert post(endpoint, body, key="wrong").status_code == 401
    assert not session.requests and post(endpoint).status_code == 200


def test_too_many_requests_at_once(opened: Opened, rollouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "AT_ONCE", 2)
    session = ScriptedSession(held=True)
    endpoint = opened(session)
    held = [raw(endpoint, http()) for _ in range(2)]
    for _ in held:
        assert session.started.acquire(timeout=60)
    answer = post(endpoint)
    assert (answer.status_code, answer.headers["x-should-retry"], answer.headers["retry-after"]) == (429, "true", "1")
    session.release(rollouts)
    for connection in held:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        connection.close()
    assert post(endpoint).status_code == 200


def test_the_bodies_under_way_are_bounded(opened: Opened, rollouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BYTES_AT_ONCE", len(json.dumps(BODY)) * 3 // 2)
    session = ScriptedSession(held=True)
    endpoint = opened(session)
    with raw(endpoint, http()) as held:
        assert session.started.acquire(timeout=60)
        assert post(endpoint).status_code == 429
        session.release(rollouts)
        assert held.recv(20).startswith(b"HTTP/1.1 200")
    assert post(endpoint).status_code == 200


def test_a_large_body_is_read_and_its_values_are_bounded(opened: Opened) -> None:
    session = ScriptedSession()
    endpoint = opened(session)
    text = 'a, "b" [c] {d} \\' * 60_000
    assert post(endpoint, {"messages": [{"role": "user", "content": text}]}).status_code == 200
    assert session.requests[0].messages == [{"role": "user", "content": text}]  # type: ignore[union-attr]
    many = b'{"messages": [' + b"[]," * (app.MOST_VALUES // 2 + 1) + b"[]]}"
    answer = post(endpoint, many)
    assert answer.status_code == 400 and "values" in answer.json()["error"]["message"]
    assert len(session.requests) == 1


def test_half_requests_leave_the_server_open(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RECEIVE_S", 1.0)
    session = ScriptedSession()
    endpoint = opened(session)
    half = [raw(endpoint, http()[: 20 + 3 * index]) for index in range(40)]
    half += [raw(endpoint, "\x16\x03\x01 no HTTP\n\n") for _ in range(5)]
    assert post(endpoint).status_code == 200
    for connection in half:
        connection.settimeout(60)
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            pass
        connection.close()
    assert len(session.requests) == 1


def test_a_further_socket_serves_one_endpoint(opened: Opened, endpoint_server: EndpointServer) -> None:
    session, other = ScriptedSession(), ScriptedSession()
    endpoint, other_endpoint = opened(session), opened(other)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    assert endpoint.serve is not None
    endpoint.serve(listening)
    there = AgentEndpoint(url, endpoint.key, "m")
    assert post(there).status_code == 200 and len(session.requests) == 1
    assert post(there, key=other_endpoint.key).status_code == 401 and not other.requests
    endpoint_server.close(endpoint)
    with pytest.raises(httpx.TransportError):
        post_until_refused(there)
    late = socket.create_server(("127.0.0.1", 0))
    endpoint_server.accept(endpoint, late)
    assert late.fileno() == -1


def test_a_server_stops_with_requests_under_way(rollouts: asyncio.AbstractEventLoop) -> None:
    own = EndpointServer()
    session = ScriptedSession(held=True)
    endpoint = own.open(session, rollouts)
    with raw(endpoint, http()) as connection:
        assert session.started.acquire(timeout=60)
        own.stop()
        assert b"401" in connection.recv(4096)
    with pytest.raises(httpx.ConnectError):
        post(endpoint)
    assert session.ended.acquire(timeout=60)
    own.stop()


def test_a_process_has_one_server() -> None:
    assert server() is server()


def test_replies_do_not_wait_for_acknowledgements(opened: Opened, endpoint_server: EndpointServer) -> None:
    endpoint = opened(ScriptedSession())
    with httpx.Client(headers={"x-api-key": endpoint.key}) as client:
        assert client.post(endpoint.url + CHAT, json=BODY).status_code == 200
        options = [
            connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for connection in endpoint_server._http.server_state.connections
        ]
    assert options and all(options)


def test_a_closed_endpoint_releases_its_session(
    endpoint_server: EndpointServer, rollouts: asyncio.AbstractEventLoop
) -> None:
    session = ScriptedSession()
    endpoint = endpoint_server.open(session, rollouts)
    with httpx.Client(headers={"x-api-key": endpoint.key}) as client:  # the connection outlives the session
        assert client.post(endpoint.url + CHAT, json=BODY).status_code == 200
        assert client.post(f"{endpoint.url}/v1/responses", json={"input": "hi"}).status_code == 200
        endpoint_server.close(endpoint)
        remains, url = weakref.ref(session), endpoint.url
        del session, endpoint
        assert client.post(url + CHAT, json=BODY).status_code == 401
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), rollouts).result(60)
        gc.collect()
        assert remains() is None
