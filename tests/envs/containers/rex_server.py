"""Starts a server with SWE-ReX's protocol in namespaces of its own, prints address and token, and ends with its input.

Usage: python rex_server.py IMAGE [PYTHON]. PYTHON is an interpreter with SWE-ReX; without, the server below runs. An
IMAGE names a fault: `cut` loses the first reply to every command, `refuses` wants another token, `silent` has no
server, `talks` prints something else, `fails` ends at once, `stays` does not end with its input.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from boxes import NAMESPACES, OWN_FILES  # beside this file


class Handler(BaseHTTPRequestHandler):
    """Requests, one at a time; a repeated id gets the last reply."""

    token, fault, last = "", "", ("", b"", 0)

    def do_GET(self) -> None:
        self._answer({"is_alive": True, "message": ""})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.headers["X-Request-ID"]
        if name != Handler.last[0]:
            reply, status = self._reply(body)
            Handler.last = name, json.dumps(reply).encode(), status
            if self.fault == "cut" and self.path == "/execute":
                self.close_connection = True
                return
        self._answer(json.loads(Handler.last[1]), Handler.last[2])

    def _reply(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        try:
            if self.path == "/write_file":
                Path(body["path"]).parent.mkdir(parents=True, exist_ok=True)
                Path(body["path"]).write_text(body["content"])
                return {}, 200
            ran = subprocess.run(
                body["command"], timeout=body["timeout"], stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            path = "swerex.exceptions.CommandTimeoutError" if late else f"builtins.{type(error).__name__}"
            return {"swerexception": {"message": str(error), "class_path": path, "traceback": ""}}, 511
        out, err = (data.decode(errors="backslashreplace") for data in (ran.stdout, ran.stderr))
        return {"stdout": out, "stderr": err, "exit_code": ran.returncode}, 200

    def _answer(self, reply: dict[str, Any], status: int = 200) -> None:
        if self.headers["X-API-Key"] != self.token:
            reply, status = {"detail": "Invalid API Key"}, 401
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def serve(port: int, token: str, fault: str) -> None:
    """Serves until killed."""
    Handler.token, Handler.fault = token, fault
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def start(image: str, python: str | None) -> None:
    """Starts the server, prints its address, and kills the server when the input ends."""
    if image == "fails":
        sys.exit("there is no machine left")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token, url = secrets.token_hex(8), f"http://127.0.0.1:{port}"
    own = [sys.executable, __file__, "serve", str(port), token, image]
    real = [python or "", "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    server = subprocess.Popen(
        [
            *NAMESPACES,
            "sh",
            "-c",
            OWN_FILES,
            "box",
            *(["sleep", "99"] if image == "silent" else real if python else own),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "OF_THE_IMAGE": "kept"},
    )
    print("starting" if image == "talks" else f"{url} {'other' if image == 'refuses' else token}", flush=True)
    sys.stdin.read()
    server.send_signal(signal.SIGKILL)
    server.wait()
    if image == "stays":
        time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        start(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
