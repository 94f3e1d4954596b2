"""A stand-in for a trajectory's endpoint: answers every request with the same text, on any number of sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from skyrl_mega.envs.agent import AgentEndpoint

KEY = "sk-test"


class Policy:
    """The endpoint, and the requests that it received."""

    def __init__(self, text: str) -> None:
        self.text, self.requests = text, list[dict[str, Any]]()
        self.served: list[ThreadingHTTPServer] = []
        url = self.serve(socket.create_server(("127.0.0.1", 0)))
        self.endpoint = AgentEndpoint(url, KEY, "policy", self.serve)

    def serve(self, listener: socket.socket) -> str:
        """Answers the connections of a listening socket in a thread; returns the address."""
        host, port = listener.getsockname()
        server = ThreadingHTTPServer((host, port), self._handler(), bind_and_activate=False)
        server.socket.close()
        server.socket, server.daemon_threads = listener, True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self.served.append(server)
        return f"http://{host}:{port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        policy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = self.headers["Authorization"].removeprefix("Bearer ")
                policy.requests.append({"path": self.path, "key": key, **body})
                message = {"role": "assistant", "content": policy.text}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
                data = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def answering(text: str) -> Iterator[Policy]:
    """Yields an endpoint that answers with a text."""
    policy = Policy(text)
    try:
        yield policy
    finally:
        for server in policy.served:
            server.shutdown()
            server.server_close()
