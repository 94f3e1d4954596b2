"""Measures the server of agents: added latency, CPU and memory of the driver, with honest and with hostile clients.

    python -m benchmarks.endpoint [--sessions 1000] [--turns 4] [--seconds 5] [--half 10000] [--output FILE.json]

The sessions answer after `--seconds` with a fixed reply, so a request's added latency is its duration for the client
minus the duration in the session, which the reply contains. Clients run in a process of their own. CPU seconds and
memory are those of this process, which stands for the driver. The hostile phases repeat the honest one beside half
requests, wrong keys, oversized bodies, slow and vanishing clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.driver import allow_open_files
from skyrl_mega.rollout.endpoint import app
from skyrl_mega.rollout.endpoint.requests import ChatRequest, PolicyReply, TokenRequest
from skyrl_mega.rollout.endpoint.server import EndpointServer

PATH = "/v1/chat/completions"
MESSAGE_BYTES = 4000
"""Bytes that every turn adds to a conversation."""
TOKENS = 256
"""Tokens of a reply."""
REPLY = PolicyReply("r", "x" * 1000, "", "x" * 1000, (), [7] * TOKENS, [-0.5] * TOKENS, "stop", None, 1000, 0)


class TimedSession:
    """A session that answers every request after `seconds`, with the measured time as text.

    Args:
        seconds: Seconds until the answer.
        counts: Counts of `started`, `answered` and `cancelled` requests, shared by all sessions.
    """

    def __init__(self, seconds: float, counts: Counter[str]) -> None:
        self._seconds, self._counts = seconds, counts

    async def reply(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        """Returns a reply."""
        start = time.perf_counter()
        self._counts["started"] += 1
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        self._counts["answered"] += 1
        return [replace(REPLY, content=f"{time.perf_counter() - start:.6f} {REPLY.text}")]


@dataclass(frozen=True)
class Load:
    """The work of the clients' process."""

    port: int
    keys: list[str]
    turns: int
    seconds: float
    """Seconds of a session's answer; the sessions begin at random times within them."""
    half: int = 0
    """Number of half requests; 0 for the honest phase."""


def request_text(key: str, body: bytes) -> bytes:
    """Returns an HTTP request."""
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def conversation(turn: int) -> bytes:
    """Returns the body of a session's request."""
    text = "y" * MESSAGE_BYTES
    return json.dumps({"messages": [{"role": "user", "content": text}] * (turn + 1)}).encode()


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> tuple[int, bytes]:
    """Sends a request and returns status and body of the reply."""
    writer.write(data)
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return int(head.split(b" ", 2)[1]), await reader.readexactly(int(lines[b"content-length"]))


async def run_session(load: Load, key: str, counts: Counter[str], added: list[float]) -> None:
    """Runs the turns of one session on one connection."""
    await asyncio.sleep(random.random() * load.seconds)
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    for turn in range(load.turns):
        start = time.perf_counter()
        counts["sent"] += 1
        status, body = await exchange(reader, writer, request_text(key, conversation(turn)))
        seconds = time.perf_counter() - start
        counts[f"status {status}"] += 1
        if status != 200:
            continue
        content = json.loads(body)["choices"][0]["message"]["content"]
        added.append(seconds - float(content.split()[0]))
    writer.close()


async def half_request(load: Load, key: str) -> None:
    """Sends a part of a request and waits until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    data = request_text(key, conversation(1))
    writer.write(data[: random.randrange(1, len(data) - 1)])
    await reader.read()
    writer.close()


async def wrong_key(load: Load, key: str) -> None:
    """Sends a request with a wrong key and checks the refusal."""
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    status, _ = await exchange(reader, writer, request_text(key[:-1], conversation(0)))
    assert status == 401, status
    writer.close()


async def oversized(load: Load, key: str) -> None:
    """Sends a body above the limit and checks the refusal."""
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    status, _ = await exchange(reader, writer, request_text(key, b"x" * (app.BODY_BYTES + 1)))
    assert status == 413, status
    writer.close()


async def vanishing(load: Load, key: str) -> None:
    """Sends a request and closes the connection before the reply."""
    _, writer = await asyncio.open_connection("127.0.0.1", load.port)
    writer.write(request_text(key, conversation(0)))
    await writer.drain()
    await asyncio.sleep(load.seconds / 4)
    writer.close()


async def slow(load: Load, key: str) -> None:
    """Sends a request in small pieces and reads the reply byte by byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    data = request_text(key, conversation(0))
    for start in range(0, len(data), 1000):
        writer.write(data[start : start + 1000])
        await asyncio.sleep(0.5)
    assert (await reader.readexactly(15)) == b"HTTP/1.1 200 OK"
    with suppress(asyncio.IncompleteReadError):
        for _ in range(100):
            await reader.readexactly(1)
            await asyncio.sleep(0.02)
    writer.close()


Client = Callable[[Load, str], Awaitable[None]]


async def hostile(load: Load, counts: Counter[str]) -> None:
    """Runs hostile clients of every kind, half requests in waves of a thousand."""

    async def run(client: Client, number: int, wave: int) -> None:
        for start in range(0, number, wave):
            keys = [random.choice(load.keys) for _ in range(min(wave, number - start))]
            results = await asyncio.gather(*(client(load, key) for key in keys), return_exceptions=True)
            counts[client.__name__] += len(results)
            for result in results:
                if isinstance(result, AssertionError):
                    counts[f"{client.__name__} wrong"] += 1
                elif isinstance(result, Exception):
                    counts[f"{client.__name__} {type(result).__name__}"] += 1

    await asyncio.gather(
        run(half_request, load.half, max(1, load.half // 2)),
        run(wrong_key, load.half // 10, 50),
        run(oversized, 20, 2),
        run(vanishing, load.half // 20, 100),
        run(slow, load.half // 100, 100),
    )


def run_load(load: Load) -> tuple[Counter[str], list[float]]:
    """Runs all clients of a phase; returns counts and the added latencies in seconds."""
    allow_open_files()
    counts: Counter[str] = Counter()
    added: list[float] = []

    async def run() -> None:
        sessions = [run_session(load, key, counts, added) for key in load.keys]
        await asyncio.gather(*sessions, *([hostile(load, counts)] if load.half else []))

    asyncio.run(run())
    return counts, added


def resident_mib() -> float:
    """Returns the resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def percentile(values: list[float], share: float) -> float:
    """Returns the value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def phase(
    pool: ProcessPoolExecutor, loop: asyncio.AbstractEventLoop, server: EndpointServer, load: Load
) -> dict[str, Any]:
    """Measures a phase with sessions of its own."""
    counts: Counter[str] = Counter()
    endpoints = [server.open(TimedSession(load.seconds, counts), loop) for _ in load.keys]
    port = int(endpoints[0].url.rpartition(":")[2])
    keys = [endpoint.key for endpoint in endpoints]
    cpu, start = time.process_time(), time.perf_counter()
    seen, added = pool.submit(run_load, replace(load, port=port, keys=keys)).result()
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
    for endpoint in endpoints:
        server.close(endpoint)
    answered = counts["answered"]
    return {
        "seconds": round(seconds, 1),
        "requests": len(added),
        "added_p50_ms": round(1000 * percentile(added, 0.5), 2),
        "added_p99_ms": round(1000 * percentile(added, 0.99), 2),
        "cpu_us_per_request": round(1e6 * cpu / answered),
        "cpu_us_per_token": round(1e6 * cpu / answered / TOKENS, 2),
        "resident_mib": round(resident_mib(), 1),
        "sessions": dict(counts),
        "clients": dict(seen),
    }


def main() -> None:
    """Runs honest phases, a phase without waiting for the policy, and hostile phases; prints the figures."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sessions", type=int, default=1000)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--half", type=int, default=10_000)
    options.add_argument("--output", type=Path)
    given = options.parse_args()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    server = EndpointServer()
    load = Load(0, [""] * given.sessions, given.turns, given.seconds)
    loads = {
        "first": load,
        "second": load,
        "without_waiting": replace(load, seconds=0.0),
        "hostile": replace(load, half=given.half),
        "hostile_again": replace(load, half=given.half),
        "after": load,
    }
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, work in loads.items():
            results[name] = phase(pool, loop, server, work)
            print(name, json.dumps(results[name]), flush=True)
    server.stop()
    if given.output:
        given.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
