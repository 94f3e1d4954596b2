"""Measures the steps of a small run with and without 1,000 requests per second at its live page.

    python -m benchmarks.live_page [--windows 3] [--seconds 10] [--rate 1000] [--output FILE.json]

The test-sized quickstart trains on CPUs and serves its page. Three kinds of windows take turns: without requests, with
requests at the page, and with the same requests at a sink, a process of the same priority with an empty answer. The
sink shows the cost of the sender on the same cores. The result is, per step, the CPU seconds of the whole run (driver,
actors and Ray, without the process of the page) and the wall time; CPU seconds also mean something on a machine with
other work. Half of the requests have the token. Requests have a connection each and are sent at their time, also if
earlier requests are unanswered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from skyrl_mega.telemetry import events
from tests.trainer import quickstart

SETTINGS = (
    *("run.name=run", "run.steps=100000", "run.epochs=100000", "telemetry.page=0", "evaluation.every=0"),
    *("evaluation.before=false", "checkpoint.every=0", "algorithm.dynamic_sampling.enabled=false", "run.patience=null"),
)
WARM = 5
"""Number of first steps before the first window."""
PAGE = "skyrl_mega.report.live.server"
START_S = 300.0
REPLY_S = 3.0
SINK = """
import asyncio, os
os.setpriority(os.PRIO_PROCESS, 0, 19)
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 204 No Content\\r\\n\\r\\n")
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@dataclass
class Window:
    """Steps of a window."""

    kind: str
    """`without`, `sink` or `page`."""
    requests: int
    """Requests sent."""
    seconds: float
    steps: int
    cpu_s: float
    """CPU seconds of the run per step."""
    wall_s: float
    """Median wall seconds of a step."""
    page_cpu_s: float
    """CPU seconds of the page's process per second."""
    statuses: dict[str, int] = field(default_factory=dict)


def cpu_seconds(root: int) -> tuple[float, float]:
    """Returns the CPU seconds of a process with all descendants, ended ones included, and of the page's process."""
    parents, seconds, pages = {}, {}, set()
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:  # ended in the meantime
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:15])) / tick
        if PAGE.encode() in command:
            pages.add(pid)
    family, wave = {root}, {root}
    while wave := {pid for pid, parent in parents.items() if parent in wave}:
        family |= wave
    pages &= family
    return sum(seconds[pid] for pid in family - pages if pid in seconds), sum(seconds[pid] for pid in pages)


async def ask(port: int, token: str | None, statuses: Counter[str]) -> None:
    """Sends a request on a connection of its own and counts the status of the reply."""
    try:
        async with asyncio.timeout(REPLY_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            header = f"Authorization: Bearer {token}\r\n" if token else ""
            writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n".encode())
            line = await reader.readline()
            while await reader.read(1 << 16):
                pass
            writer.close()
            statuses[line.decode().split(" ")[1] if line else "closed"] += 1
    except (OSError, TimeoutError) as error:
        statuses[type(error).__name__] += 1


async def load(port: int, token: str, rate: int, seconds: float) -> Counter[str]:
    """Sends `rate` requests per second for some seconds and returns the number of replies by status."""
    statuses: Counter[str] = Counter()
    start, tasks = time.monotonic(), set()
    for number in range(int(rate * seconds)):
        delay = start + number / rate - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        task = asyncio.create_task(ask(port, token if number % 2 else None, statuses))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return statuses


def step_times(folder: Path) -> list[float]:
    """Returns the end of each step, in seconds since 1970."""
    return [event.time for event in events.read(folder) if event.kind == "step"]


def measure(kind: str, pid: int, folder: Path, port: int | None, rate: int, seconds: float) -> Window:
    """Returns a window of whole steps; without a port without requests."""
    wait_for_steps(folder, len(step_times(folder)) + 1)
    before, start, (cpu, page) = len(step_times(folder)), time.time(), cpu_seconds(pid)
    statuses: Counter[str] = Counter()
    if port:
        statuses = asyncio.run(load(port, (folder / "page.token").read_text(), rate, seconds))
    else:
        time.sleep(seconds)
    wait_for_steps(folder, len(step_times(folder)) + 1)
    times, end, (cpu_after, page_after) = step_times(folder), time.time(), cpu_seconds(pid)
    walls = [b - a for a, b in zip(times[before - 1 :], times[before:], strict=False)]
    return Window(
        kind,
        int(rate * seconds) if port else 0,
        end - start,
        len(walls),
        (cpu_after - cpu) / len(walls),
        statistics.median(walls),
        (page_after - page) / (end - start),
        dict(statuses),
    )


def wait_for_steps(folder: Path, steps: int) -> None:
    """Waits until the run has finished this number of steps."""
    end = time.monotonic() + START_S
    while not (folder / events.FILE).is_file() or len(step_times(folder)) < steps:
        assert time.monotonic() < end, f"no step {steps} within {START_S:g} s"
        time.sleep(0.02)


def main() -> None:
    """Runs the benchmark and prints a line for each window."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--windows", type=int, default=3)
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--rate", type=int, default=1000)
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run"
        with (
            subprocess.Popen(
                [sys.executable, "-c", SINK], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as sink,
            subprocess.Popen(quickstart.command(Path(root), *SETTINGS), stdout=subprocess.DEVNULL) as run,
        ):
            assert sink.stdout
            ports: dict[str, int | None] = {"without": None, "sink": int(sink.stdout.readline())}
            try:
                wait_for_steps(folder, WARM)
                log = (folder / "logs" / "run.log").read_text()
                ports["page"] = int(log.partition("live page: http://127.0.0.1:")[2].partition(",")[0])
                windows = []
                for _ in range(args.windows):
                    for kind, port in ports.items():
                        windows.append(measure(kind, run.pid, folder, port, args.rate, args.seconds))
                        print(json.dumps(asdict(windows[-1])), flush=True)
            finally:
                run.terminate()
                sink.kill()
    for kind in ports:
        of = [window for window in windows if window.kind == kind]
        cpu, wall = (statistics.mean(getattr(window, name) for window in of) for name in ("cpu_s", "wall_s"))
        print(f"{kind}: {cpu:.3f} CPU seconds a step, {wall:.3f} s a step")
    if args.output:
        args.output.write_text(json.dumps([asdict(window) for window in windows], indent=1) + "\n")


if __name__ == "__main__":
    main()
