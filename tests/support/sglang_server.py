"""A server with SGLang's documented HTTP interface, around a small model; some servers lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load_file, save_file


class Model(Protocol):
    """A language model."""

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Returns the logits of the next token."""

    def load(self, path: Path) -> None:
        """Loads the weights of a directory."""


class Bigrams:
    """A model whose next token depends on the last token alone: a table [V, V] of logits."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Returns the row of the last token."""
        row: np.ndarray = self.table[tokens[-1]]
        return row

    def load(self, path: Path) -> None:
        """Loads `model.safetensors`."""
        self.table = load_file(path / "model.safetensors")["table"]

    def save(self, path: Path) -> Path:
        """Writes `model.safetensors` into a new directory and returns the directory."""
        path.mkdir(parents=True)
        save_file({"table": self.table}, path / "model.safetensors")
        return path

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Returns the log-prob of each token but the first."""
        rows = log_softmax(self.table[np.array(tokens[:-1])])
        return np.take_along_axis(rows, np.array(tokens[1:])[:, None], 1)[:, 0]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probs along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


@dataclass
class SglangStandIn:
    """The state of the server."""

    model: Model
    token: str | None = None
    """API key; None accepts all."""
    loads: bool = True
    """False: an update changes the stated version alone."""
    cumulative: bool = True
    """True: every event repeats all tokens so far, as SGLang does by default."""
    cache: int = 4096
    """Capacity of the cache in tokens."""
    token_s: float = 0.0
    """Seconds per token."""
    version: str = "default"
    calls: list[str] = field(default_factory=list)
    """Paths of the commands, in order."""
    running: threading.Event = field(default_factory=threading.Event)
    """Set unless paused."""
    ended: threading.Event = field(default_factory=threading.Event)

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answers `/update_weights_from_disk`."""
        if self.running.is_set():
            return {"success": False, "message": "generation is not paused"}
        if not Path(body["model_path"]).is_dir():
            return {"success": False, "message": f"no such folder: {body['model_path']}"}
        if self.loads:
            self.model.load(Path(body["model_path"]))
        self.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of `/generate`."""
        sampling, tokens = body["sampling_params"], list(body["input_ids"])
        prompt, draw = len(tokens), np.random.default_rng(sampling["sampling_seed"])
        pairs: list[list[Any]] = []
        finish = None
        while finish is None:
            while not self.running.wait(0.05):
                if self.ended.is_set():
                    return
            if self.ended.wait(self.token_s):
                return
            temperature = sampling["temperature"] or 1.0
            logprobs = log_softmax(self.model.logits(tokens).astype(np.float64) / temperature)
            token = int(np.argmax(logprobs + draw.gumbel(size=len(logprobs)) * bool(sampling["temperature"])))
            tokens.append(token)
            pairs.append([float(logprobs[token]), token, None])
            if token in sampling["stop_token_ids"]:
                finish = {"type": "stop", "matched": token}
            elif len(tokens) - prompt == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": len(tokens) - prompt}
            about = {
                "id": body["rid"],
                "prompt_tokens": prompt,
                "completion_tokens": len(tokens) - prompt,
                "weight_version": self.version,
                "finish_reason": finish,
                "output_token_logprobs": pairs if self.cumulative else pairs[-1:],
            }
            yield {"text": "", "output_ids": tokens[prompt:] if self.cumulative else [token], "meta_info": about}


class SglangServer(ThreadingHTTPServer):
    """A server on the loopback interface."""

    daemon_threads = True

    def __init__(self, state: SglangStandIn, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.state = state


class Handler(BaseHTTPRequestHandler):
    """Answers the requests to a server."""

    protocol_version = "HTTP/1.1"
    server: SglangServer

    @property
    def state(self) -> SglangStandIn:
        """The state of the server."""
        return self.server.state

    def log_message(self, *_: Any) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:
        """Answers questions."""
        answers = {
            "/get_model_info": {"model_path": "m", "is_generation": True, "weight_version": self.state.version},
            "/get_server_info": {"context_length": 128, "max_total_num_tokens": self.state.cache, "tp_size": 1},
            "/health": {},
        }
        self._answer(answers.get(self.path))

    def do_POST(self) -> None:
        """Answers requests and commands."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if not self._allowed():
            return
        if self.path == "/generate":
            self._stream(body)
            return
        self.state.calls.append(self.path)
        if self.path == "/pause_generation":
            self.state.running.clear()
        if self.path == "/continue_generation":
            self.state.running.set()
        known = ("/pause_generation", "/continue_generation", "/flush_cache")
        if self.path == "/update_weights_from_disk":
            self._answer(self.state.update(body))
        else:
            self._answer({"message": "done"} if self.path in known else None)

    def _allowed(self) -> bool:
        right = self.state.token is None or self.headers.get("Authorization") == f"Bearer {self.state.token}"
        if not right:
            self._answer({"error": "Unauthorized"}, 401)
        return right

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value or {}).encode()
        self.send_response(404 if value is None else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for event in self.state.events(body):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client closed the stream
        self.close_connection = True


@contextmanager
def sglang_server(state: SglangStandIn, port: int = 0) -> Iterator[str]:
    """Yields the address of a running server, which ends with the block."""
    state.running.set()
    state.ended.clear()
    server = SglangServer(state, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        state.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
