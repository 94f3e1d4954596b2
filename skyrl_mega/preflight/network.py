"""Network checks: every node reaches every other, and neighbours exchange data fast, by NCCL or gloo."""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from skyrl_mega.preflight.finding import NodeProblem, Status, main_group

CONNECT_S = 5.0
"""Time limit of a connection in seconds."""
SLOW = 0.5
"""A link below this share of the median rate is bad; a median below this share of `cluster.topology.nic_gb_s` is a
warning."""
TCP = 0.1
"""Share of `cluster.topology.nic_gb_s`; a median below it shows that NCCL uses TCP instead of the planned network."""
PROBES = 64
"""Number of connections opened at once by a node."""


@dataclass(frozen=True)
class NodeAddress:
    """Address of a node's listener, and the expected answer."""

    address: str
    port: int
    reply: str
    """Word sent to every connection. Another word means: another program answers."""


class Listener:
    """Listener on a free TCP port of this node; a thread answers every connection with `endpoint.reply` until
    `close`.

    Args:
        address: Address of this node to listen on.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=1024, family=_family(address))
        self.endpoint = NodeAddress(address, self._socket.getsockname()[1], secrets.token_hex(8))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stops answering and closes the port. Raises OSError if closed already."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; its accept would keep the port open
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
                with caller:
                    caller.sendall(self.endpoint.reply.encode())
            except OSError:
                if self._socket.fileno() < 0:
                    return


def connect(endpoints: Mapping[str, NodeAddress], timeout_s: float = CONNECT_S) -> dict[str, str]:
    """Connects to the nodes' listeners; returns node → reason for unreachable nodes only, also if another program
    answers at the address.

    Args:
        endpoints: Node → its listener.
        timeout_s: Time limit of each connection, in seconds.
    """

    def failure(endpoint: NodeAddress) -> str | None:
        try:
            with socket.create_connection((endpoint.address, endpoint.port), timeout=timeout_s) as connection:
                answer = connection.makefile("rb").read(len(endpoint.reply))
            return None if answer == endpoint.reply.encode() else "another program answers at its address"
        except OSError as error:
            return error.strerror or str(error)

    with ThreadPoolExecutor(PROBES) as pool:
        return {node: why for node, why in zip(endpoints, pool.map(failure, endpoints.values()), strict=True) if why}


def check_reach(nodes: Sequence[str], unreached: Mapping[str, Mapping[str, str]]) -> list[NodeProblem]:
    """Returns a finding (bad) for each blamed node: its first failed connection and the number of further failures. []
    if no connection failed.

    Two nodes are linked if each reaches the other; a group contains all nodes linked directly or through others. A
    failed connection between the largest group and a node outside is blamed on the node outside, any other on both
    ends.

    Args:
        nodes: All nodes.
        unreached: For each node, the reason of every failed connection by target node.
    """
    connected = main_group(nodes, lambda a, b: b not in unreached.get(a, {}))
    separate = [node for node in nodes if node not in connected]
    failures: dict[str, list[str]] = {}
    for node, failed in unreached.items():
        for other, why in failed.items():
            blamed = [n for n in (node, other) if n in separate] or [node, other]
            for name in blamed:
                failures.setdefault(name, []).append(f"{node} does not reach {other}: {why}")
    return [
        NodeProblem(node, "network", "bad", texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""))
        for node, texts in failures.items()
    ]


@dataclass(frozen=True)
class PairRate:
    """Measured data exchange between two nodes, or the cause of its failure."""

    first: str
    second: str
    gb_s: float | None
    """10⁹ bytes per second in each direction; None if the exchange failed."""
    error: str = ""
    """Cause of the failure; empty after a success."""


def pairs(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns rounds of pairs of neighbours in a ring: each node with the next, the last with the first. Two nodes are
    a single pair.

    No node is twice in a round, so the pairs of a round can be measured at the same time. [] for fewer than two nodes.
    """
    count = len(nodes)
    if count < 2:
        return []
    ring = [(nodes[i], nodes[(i + 1) % count]) for i in range(count if count > 2 else 1)]
    even, odd = ring[0 : len(ring) - len(ring) % 2 : 2], ring[1::2]
    rest = [ring[-1]] if len(ring) % 2 and len(ring) > 1 else []
    return [part for part in ((even or ring), odd, rest) if part]


def exchange_socket(address: str) -> socket.socket:
    """Returns a socket that listens on a free port of `address`, for rank 0 of an exchange. As the socket stays open,
    no other program can take the port. Raises OSError if the address is not of this node."""
    return socket.create_server((address, 0), family=_family(address))


def exchange(
    leader: tuple[str, int], address: str, device: str, mib: int, timeout_s: float, listening: socket.socket | None
) -> float:
    """Returns the measured rate between this node and its partner: 10⁹ bytes per second in each direction.

    Runs in a separate process, killed after `timeout_s`. The partner must call this function at the same time.

    Args:
        leader: Address of rank 0, and port of its `listening`.
        address: This node's address.
        device: `cuda` (NCCL over the first GPU) or `cpu` (gloo).
        mib: Size of a message in MiB.
        timeout_s: Time limit of the whole exchange in seconds.
        listening: Rank 0's socket (`exchange_socket`), closed at the end, also after an error; None for rank 1.

    Raises:
        TimeoutError: The exchange took longer than `timeout_s`.
        RuntimeError: The exchange failed, with the last line of its output.
    """
    env = dict(os.environ)
    if name := interface(address):
        env["GLOO_SOCKET_IFNAME"] = name
    if device == "cuda" and not env.get("CUDA_VISIBLE_DEVICES"):
        env["CUDA_VISIBLE_DEVICES"] = "0"  # Ray hides devices from actors without a claim
    fd = -1 if listening is None else listening.fileno()
    command = [sys.executable, "-m", "skyrl_mega.preflight.exchange", *map(str, (fd, *leader, device, mib, timeout_s))]
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            pass_fds=() if listening is None else (fd,),
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    finally:
        if listening is not None:
            listening.close()
    if done.returncode or not done.stdout.strip():
        output = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(output[-1][:300])
    return float(json.loads(done.stdout.splitlines()[-1])["gb_s"])


def interface(address: str) -> str | None:
    """Returns the name of this node's network interface with the IP address `address`, such as `eth0`; None without
    any."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return str(name)
    return None


@dataclass(frozen=True)
class ExpectedRate:
    """Expected network rate between nodes, and its reliability."""

    gb_s: float
    """Rate of a network card in 10⁹ bytes per second (`cluster.topology.nic_gb_s`)."""
    is_reliable: bool
    """True if the rate is not the default, or if a node has InfiniBand or RoCE adapters. Otherwise the default says
    nothing about the network."""


def check_rates(pairs_measured: Sequence[PairRate], expected: ExpectedRate | None) -> list[NodeProblem]:
    """Returns findings about the network between nodes, at most one per node; [] without a problem.

    A link is bad if broken or slower than half the median. If all links of a node (at least two) are bad, only that
    node gets a finding; any other bad link gets a finding at both ends. If no link is bad, but the median is below half
    the expected rate, every node gets a finding: bad if the expected rate is reliable and the median is below a tenth
    of it, as only TCP explains; else a warning.

    Args:
        pairs_measured: Results of all pairs.
        expected: Expected rate; None compares the links only with each other.
    """
    rates = [p.gb_s for p in pairs_measured if p.gb_s is not None]
    median = statistics.median(rates) if rates else 0.0
    bad_pairs = [p for p in pairs_measured if p.gb_s is None or p.gb_s < SLOW * median]
    by_node: dict[str, list[PairRate]] = {}
    for pair in pairs_measured:
        for node in (pair.first, pair.second):
            by_node.setdefault(node, []).append(pair)
    slow_nodes = [node for node, links in by_node.items() if len(links) > 1 and all(p in bad_pairs for p in links)]
    findings: dict[str, NodeProblem] = {}
    for pair in bad_pairs:
        rate = pair.error if pair.gb_s is None else f"{pair.gb_s:.2f} GB/s, the median is {median:.2f}"
        for node in [n for n in (pair.first, pair.second) if n in slow_nodes] or (pair.first, pair.second):
            findings.setdefault(node, NodeProblem(node, "network", "bad", f"{pair.first} ⇄ {pair.second}: {rate}"))
    if expected and not bad_pairs and median < SLOW * expected.gb_s:
        text = f"{median:.1f} GB/s between nodes, cluster.topology.nic_gb_s is {expected.gb_s:g}"
        over_tcp = expected.is_reliable and median < TCP * expected.gb_s
        if over_tcp:
            text += (
                ": so slow that NCCL must be using TCP instead of the planned network; NCCL_DEBUG=INFO shows "
                "its choice; if the network really is slower, set cluster.topology.nic_gb_s to its rate"
            )
        elif not expected.is_reliable:
            text += (
                ", its default; no node has InfiniBand or RoCE adapters; set it to the rate of your network, for plans"
            )
        status: Status = "bad" if over_tcp else "warn"
        findings |= {node: NodeProblem(node, "network", status, text) for node in by_node}
    return list(findings.values())


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
