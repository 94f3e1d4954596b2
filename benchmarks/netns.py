"""A network of simulated nodes on one machine: a Linux network namespace each, joined by links of a known rate.

    reason = unavailable()
    with network(nodes=4, mbit=400) as nodes:
        server = nodes[0].run(["python", "serve.py", nodes[0].address])
        nodes[1].run(["python", "fetch.py", nodes[0].address]).wait(timeout=30)
        print(nodes[1].received())

Every node is joined by a link, a veth pair into a bridge in a separate namespace. `tc`'s token bucket limits both
directions of a link to the rate; a link stands for a full-duplex NIC. Processes of a node talk over the node's
loopback, unshaped. The machine's network is not changed, and no packet leaves the namespaces.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "skyrl-mega"
"""Prefix of namespaces, named `skyrl-mega-<process id>-<network>-<node>`."""
MTU = 9000
"""Bytes of a packet: jumbo frames, as in a cluster's network. Headers take less than 1 % of a link."""
LINK = "eth0"
"""Name of a node's link inside the node."""

_networks = itertools.count()
_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}


class NetworkError(RuntimeError):
    """A failed command of iproute2; the message holds the command and its error output."""


@dataclass(frozen=True)
class Node:
    """A simulated node. `address` is the IPv4 address in the network, `namespace` the name for `ip netns`."""

    name: str
    namespace: str
    address: str

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command inside the node; `options` are Popen's. The process id is the command's.

        The end of the network kills all processes in the nodes.
        """
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *argv], **options)

    def received(self) -> int:
        """Returns the bytes received by the node over the link so far, headers included."""
        return self._count("rx_bytes")

    def sent(self) -> int:
        """Returns the bytes sent by the node over the link so far, headers included."""
        return self._count("tx_bytes")

    def _count(self, counter: str) -> int:
        # Within the namespace: `ip netns exec` mounts a /sys with the namespace's devices.
        return int(_do("ip", "netns", "exec", self.namespace, "cat", f"/sys/class/net/{LINK}/statistics/{counter}"))


def unavailable() -> str | None:
    """Returns the reason why a shaped network cannot be made here, in a line for skipping; None if possible."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (Debian: apt-get install iproute2)"
    status = Path("/proc/self/status").read_text()
    held = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    capabilities = int(held[1], 16) if held else 0
    missing = [name for bit, name in _CAPABILITIES.items() if not capabilities >> bit & 1]
    if missing:
        return f"network namespaces need root; this process lacks {' and '.join(missing)}"
    try:
        with network(nodes=1, mbit=100):
            return None
    except NetworkError as error:
        return f"network namespaces are not allowed here: {error}"


@contextmanager
def network(nodes: int, mbit: float | None) -> Iterator[list[Node]]:
    """Makes a network of `nodes` nodes with links of `mbit` megabits a second each way; None leaves the links unshaped.

    At the end, also after a failure in the body, all processes in the nodes are killed, and namespaces, bridge and
    links are removed.

    Raises:
        NetworkError: The network cannot be made here; `unavailable` returns the reason beforehand.
        ValueError: Not between 1 and 250 nodes, or a rate below or equal to 0.
    """
    if not 1 <= nodes <= 250:
        raise ValueError(f"nodes: {nodes} is not between 1 and 250")
    if mbit is not None and mbit <= 0:
        raise ValueError(f"mbit: {mbit} is not above 0")
    _remove_abandoned()
    group = f"{PREFIX}-{os.getpid()}-{next(_networks)}"
    switch = f"{group}-switch"
    simulated = [Node(f"node{n}", f"{group}-node{n}", f"10.77.0.{n + 1}") for n in range(nodes)]
    namespaces = [switch, *(node.namespace for node in simulated)]
    try:
        for namespace in namespaces:
            _do("ip", "netns", "add", namespace)
        _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge", "mtu", str(MTU), "up")
        for node in simulated:
            _connect(node, switch, mbit)
        yield simulated
    finally:
        _remove(namespaces)


def _connect(node: Node, switch: str, mbit: float | None) -> None:
    """Puts the node's link up. Both ends are created in the namespaces, and never appear in the machine's network."""
    port = node.name
    _do("ip", "link", "add", LINK, "netns", node.namespace, "type", "veth", "peer", "name", port, "netns", switch)
    _do("ip", "-n", switch, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
    _do("ip", "-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", LINK)
    _do("ip", "-n", node.namespace, "link", "set", LINK, "mtu", str(MTU), "up")
    _do("ip", "-n", node.namespace, "link", "set", "lo", "up")
    if mbit is None:
        return
    # Each end shapes its own output. The bucket holds 2 ms of the rate, or an offloaded 64 KiB segment if larger.
    burst = max(2**17, round(mbit * 1e6 / 8 * 2e-3))
    shape = ("root", "tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "latency", "50ms")
    _do("tc", "-n", node.namespace, "qdisc", "add", "dev", LINK, *shape)
    _do("tc", "-n", switch, "qdisc", "add", "dev", port, *shape)


def _remove(namespaces: Sequence[str]) -> None:
    """Kills all processes in the namespaces, then removes the namespaces with bridge and links.

    Raises:
        NetworkError: Some namespaces are still in use; the message names them.
    """
    existing = set(_existing())
    doomed = [name for name in namespaces if name in existing]
    deadline = time.monotonic() + 10
    while running := [int(pid) for name in doomed for pid in _do("ip", "netns", "pids", name).split()]:
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise NetworkError(f"processes {running} do not end; they keep {', '.join(doomed)}")
        time.sleep(0.02)
    for name in doomed:
        _do("ip", "netns", "delete", name)


def _remove_abandoned() -> None:
    """Removes the networks of killed processes."""
    owners = {name: re.fullmatch(rf"{PREFIX}-(\d+)-.*", name) for name in _existing()}
    _remove([name for name, owner in owners.items() if owner and not Path(f"/proc/{owner[1]}").exists()])


def _existing() -> list[str]:
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.strip()]


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        words = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise NetworkError(f"`{' '.join(command)}`: {words}")
    return done.stdout
