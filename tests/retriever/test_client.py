"""The client's behaviour with a missing, slow or faulty service."""

from __future__ import annotations

import gzip
import itertools
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from skyrl_mega.retriever.client import RetrievalError, SearchClient
from tests.retriever.services import Running


@contextmanager
def answering(*replies: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, list[float]]]:
    """Yields the URL of a server with these replies in turn, the last forever, and the times of the requests."""
    asked: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            code, headers, body = replies[min(len(asked), len(replies) - 1)]
            asked.append(time.monotonic())
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


FOUND = b'{"result": [[{"document": {"id": 7, "contents": "\\"t\\"\\nx"}, "score": 0.5}]]}'


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(RetrievalError) as caught:
        SearchClient(url, timeout_s=1.0).search(["x"])
    assert 0.3 < time.monotonic() - start < 15
    assert f"{url}/retrieve gave no answer in 1 s" in str(caught.value) and "ConnectError" in str(caught.value)


def test_a_closed_client_refuses_searches_and_closes_again() -> None:
    client = SearchClient("http://127.0.0.1:1")
    client.close()
    for ask in (lambda: client.search(["x"]), client.health):
        with pytest.raises(RetrievalError, match="this client is closed"):
            ask()
    client.close()


def test_one_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(RetrievalError, match="no complete answer in"):
            SearchClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=2.0).search(["x"])
    assert time.monotonic() - start < 15


def test_trouble_is_tried_again_with_growing_pauses() -> None:
    with answering(*[(500, {}, b"boom")] * 4, (200, {}, FOUND)) as (url, asked):
        (hit,) = SearchClient(f"{url}/retrieve").search(["x"])[0]
    assert (hit.id, hit.contents, hit.score) == ("7", '"t"\nx', 0.5)
    pauses = [b - a for a, b in itertools.pairwise(asked)]
    for n, pause in enumerate(pauses):
        assert 0.05 * 2**n <= pause <= 0.1 * 2**n + 5


def test_it_comes_back_when_it_is_asked_to() -> None:
    with answering((503, {"Retry-After": "1"}, b"full"), (200, {}, FOUND)) as (url, asked):
        SearchClient(url).search(["x"])
    assert 1.0 <= asked[1] - asked[0] < 10


@pytest.mark.parametrize(
    "reply, said",
    [
        ((404, {}, b"no such page"), "refused: HTTP 404: no such page"),
        ((200, {}, b"{}"), "did not answer as Search-R1's retriever"),
        ((200, {}, b"<html>"), "Malformed: Expecting value"),
    ],
)
def test_a_refusal_is_not_tried_again(reply: tuple[int, dict[str, str], bytes], said: str) -> None:
    with answering(reply) as (url, asked):
        with pytest.raises(RetrievalError) as caught:
            SearchClient(url).search(["x"])
        assert said in str(caught.value) and url in str(caught.value) and len(asked) == 1


@contextmanager
def trickling(start: bytes) -> Iterator[str]:
    """Yields a server that answers each connection with `start`, then a byte every tenth of a second forever."""
    ended = threading.Event()

    def serve(taken: socket.socket) -> None:
        with taken, suppress(OSError):
            taken.recv(65536)
            taken.sendall(start)
            while not ended.wait(0.1):
                taken.sendall(b"a")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n99999\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: ",
        b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n",
    ],
    ids=["body", "chunk", "header", "error"],
)
def test_a_reply_that_trickles_ends_with_the_time_of_the_search(start: bytes) -> None:
    raised: list[RetrievalError] = []

    def search(url: str) -> None:
        with pytest.raises(RetrievalError) as caught:
            SearchClient(url, timeout_s=1.0).search(["x"])
        raised.append(caught.value)

    with trickling(start) as url:
        asking = threading.Thread(target=search, args=(url,), daemon=True)
        asking.start()
        asking.join(20)  # the old reader waited forever
        assert not asking.is_alive() and "gave no answer in 1 s" in str(raised[0])


def packed(text: bytes, times: int) -> bytes:
    for _ in range(times):
        text = gzip.compress(text)
    return text


@pytest.mark.parametrize(
    "reply, said",
    [
        (({"Content-Encoding": "gzip"}, packed(b" " * 65 * 2**20, 1)), "it has more than 67108864 bytes"),
        (({"Content-Encoding": "deflate"}, zlib.compress(b" " * 65 * 2**20)), "it has more than 67108864 bytes"),
        (({"Content-Encoding": "gzip, gzip"}, packed(FOUND, 2)), "it is packed as gzip, gzip; allowed: identity, gzip"),
        (({"Content-Encoding": "br"}, b"x"), "it is packed as br; allowed: identity, gzip, deflate"),
    ],
)
def test_a_reply_is_bounded_after_unpacking(reply: tuple[dict[str, str], bytes], said: str) -> None:
    with answering((200, *reply)) as (url, _), pytest.raises(RetrievalError, match=said):
        SearchClient(url).search(["x"])


def test_a_packed_reply_is_read() -> None:
    with answering((200, {"Content-Encoding": "gzip"}, packed(FOUND, 1))) as (url, _):
        assert SearchClient(url).search(["x"])[0][0].id == "7"


@pytest.mark.parametrize(
    "old, new, said",
    [
        (b"0.5", b"1" + b"0" * 400, "a whole number of 1329 bits"),
        (b"0.5", b"1e400", "inf is no number"),
        (b"0.5", b"true", "score true; allowed are finite numbers"),
        (b"0.5", b'"0.5"', "score '0.5'; allowed are finite numbers"),
        (b"7", b"[7]", r"id \[7\]; allowed: text or a whole number"),
        (b"7", b"null", "id null; allowed: text or a whole number"),
        (b"[[{", b'[[{"document": {"id": 1, "contents": "b"}, "score": 1}, {', "answered 2 passages where topk = 1"),
        (b"[[{", b'[5, [{', "did not answer as Search-R1's retriever"),
    ],
)  # fmt: skip
def test_a_hit_of_another_form_is_named(old: bytes, new: bytes, said: str) -> None:
    with answering((200, {}, FOUND.replace(old, new))) as (url, _), pytest.raises(RetrievalError, match=said):
        SearchClient(url).search(["x"], topk=1)


def connections_to(url: str) -> int:
    """Returns the number of connections to the port of `url` known to this machine, recently closed connections
    included.
    """
    port = f":{int(url.rpartition(':')[2]):04X}"
    return sum(line.split()[2].endswith(port) for line in Path("/proc/net/tcp").read_text().splitlines()[1:])


def test_connections_are_used_again(service: Running) -> None:
    client = SearchClient(service.url)
    client.search(["Budapest"])
    before = connections_to(service.url)
    for _ in range(20):
        client.search(["Budapest"])
    assert 1 <= connections_to(service.url) <= before
    client.close()
