"""An OpenAI-compatible endpoint that multiplies, and fails on demand."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | tuple[int, dict[str, str], str] | None
"""Fields over the usual choice; or status, headers and body; or None to drop the connection."""


class Fake(ThreadingHTTPServer):
    """An HTTP server answering `a times b` with `#### a·b`, wrong for two of three seeds. Tokens are words."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.script: deque[Answer] = deque()
        """Answers for the next requests, instead of the usual answer."""
        self.delay: Callable[[int], float] = lambda number: 0.0
        """Delay of request `number` in seconds."""
        self.running = self.most = 0
        self.lock = threading.Lock()

    @property
    def asked(self) -> list[tuple[str, int]]:
        """Returns (last message, seed) of every request."""
        return [(body["messages"][-1]["content"], body["seed"]) for body in self.bodies]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the usual answer."""
        a, b = map(int, re.findall(r"\d+", body["messages"][0]["content"])[:2])
        text = f"It is #### {a * b if body['seed'] % 3 == 0 else a * b + 1}"
        words = sum(len(m["content"].split()) for m in body["messages"])
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": words, "completion_tokens": len(text.split())}}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of killed clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def do_POST(self) -> None:
        fake = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.bodies.append(body)
            fake.headers.append(dict(self.headers))
            number = len(fake.bodies)
            scripted = fake.script.popleft() if fake.script else {}
            fake.running += 1
            fake.most = max(fake.most, fake.running)
        time.sleep(fake.delay(number))
        with fake.lock:
            fake.running -= 1
        if scripted is None:
            self.close_connection = True
            return
        status, headers, text = 200, {}, ""
        if isinstance(scripted, tuple):
            status, headers, text = scripted
        else:
            answer = fake.answer(body)
            answer["choices"][0] |= scripted
            text = json.dumps(answer)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


@contextmanager
def serving() -> Iterator[Fake]:
    """Runs the endpoint in threads of this process."""
    fake = Fake()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        fake.shutdown()
        thread.join()
        fake.server_close()
