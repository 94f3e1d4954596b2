"""Simulated nodes: a shaped link keeps its rate in both directions, and nothing remains afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netns
from benchmarks.netns import Node, network, unavailable

SEND = """
import socket, sys
address, size = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 9000), timeout=120) as wire:
    wire.sendall(bytes(size))
    wire.shutdown(socket.SHUT_WR)
    wire.recv(1)
"""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 9000)) as door:
    print("ready", flush=True)
    wire, _ = door.accept()
    wire.settimeout(120)
    got, start = len(wire.recv(2**20)), time.monotonic()
    while part := wire.recv(2**20):
        got += len(part)
    print(got, time.monotonic() - start, flush=True)
"""

ATTEMPTS = 5
"""Number of transfers per link; the fastest counts, because a busy machine may delay some."""


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if reason := unavailable():
        pytest.skip(reason)


def ours() -> list[str]:
    """Returns the namespaces of this process, as listed by `ip`."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{netns.PREFIX}-{os.getpid()}-")]


def links() -> list[str]:
    """Returns the names of the machine's network devices."""
    return sorted(os.listdir("/sys/class/net"))


def alive(pid: int) -> bool:
    """Returns True if a process runs; a zombie, without command line, does not count."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def throughput(source: Node, target: Node, size: int) -> tuple[float, int, int]:
    """Sends `size` bytes; returns megabits of payload per second, bytes sent by the source and bytes received by the
    target."""
    receiver = target.run([sys.executable, "-c", RECEIVE, target.address], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    before = source.sent(), target.received()
    sender = source.run([sys.executable, "-c", SEND, target.address, str(size)])
    got, seconds = receiver.stdout.readline().split()
    assert sender.wait(120) == 0 and receiver.wait(120) == 0
    assert int(got) == size
    return size * 8 / float(seconds) / 1e6, source.sent() - before[0], target.received() - before[1]


def test_a_link_holds_its_rate_in_both_directions() -> None:
    size, rate = 8 * 2**20, 40
    with network(nodes=2, mbit=rate) as (first, second):
        for source, target in ((first, second), (second, first)):
            rates = []
            while len(rates) < ATTEMPTS and max(rates, default=0) <= 0.9 * rate:
                mbit, out, into = throughput(source, target, size)
                rates.append(mbit)
                assert size < out < 1.02 * size and size < into < 1.02 * size
            assert 0.9 * rate < max(rates) < 1.1 * rate


def test_an_unshaped_link_is_far_faster() -> None:
    with network(nodes=2, mbit=None) as (first, second):
        assert any(throughput(first, second, 50 * 2**20)[0] > 1000 for _ in range(ATTEMPTS))


def test_nothing_remains() -> None:
    before = links()
    with network(nodes=3, mbit=100) as nodes, network(nodes=1, mbit=100):
        assert len(ours()) == 6  # including two switches
        assert links() == before
        idle = nodes[0].run(["sleep", "600"])
    assert ours() == [] and links() == before
    assert idle.wait(60) == -signal.SIGKILL


def test_nothing_remains_when_the_body_raises() -> None:
    before = links()
    daemons: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fail_with_a_daemon(daemons)
    assert ours() == [] and links() == before
    assert len(daemons) == 1 and not alive(daemons[0])


def fail_with_a_daemon(daemons: list[int]) -> None:
    """Raises inside a network with a daemon that left its parent and session."""
    with network(nodes=2, mbit=100) as nodes:
        nodes[1].run(["setsid", "--fork", "sleep", "600"]).wait(60)
        listed = subprocess.run(["ip", "netns", "pids", nodes[1].namespace], capture_output=True, text=True).stdout
        daemons += map(int, listed.split())
        raise ZeroDivisionError


def test_a_killed_owner_leaves_nothing_for_long() -> None:
    code = (
        "import time; from benchmarks.netns import network\n"
        "with network(2, 100):\n  print('up', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    owner.kill()
    owner.wait()
    name = f"{netns.PREFIX}-{owner.pid}-"
    assert any(line.startswith(name) for line in netns._existing())
    with network(nodes=1, mbit=None):
        assert not any(line.startswith(name) for line in netns._existing())


def test_a_missing_tool_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    reason = unavailable()
    assert reason is not None and "iproute2" in reason


def test_a_user_without_rights_gets_the_reason() -> None:
    """Checks in a process without root rights."""
    code = (
        "import os; from benchmarks.netns import unavailable\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); print(unavailable())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "CAP_NET_ADMIN" in output


@pytest.mark.parametrize("nodes, mbit", [(0, 100.0), (251, 100.0), (1, 0.0), (1, -1.0)])
def test_impossible_networks_are_refused(nodes: int, mbit: float) -> None:
    with pytest.raises(ValueError), network(nodes, mbit):
        time.sleep(0)
