"""Report of a preflight: a table of nodes and checks, and a line for every finding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from skyrl_mega.preflight.finding import NodeProblem

COLUMNS = ("answers", "gpus", "versions", "paths", "disk", "model", "network")
"""All checks, in the order of the table."""


@dataclass(frozen=True)
class PreflightReport:
    """Results of a preflight: nodes, checks and findings."""

    nodes: tuple[str, ...]
    """Names of the nodes that Ray has."""
    checks: tuple[str, ...]
    """Performed checks, a subset of `COLUMNS`."""
    findings: tuple[NodeProblem, ...]
    seconds: float
    """Duration of the preflight."""
    gb_s: tuple[float, ...] = ()
    """Measured rates between pairs of nodes, in 10⁹ bytes per second; without failed pairs."""

    @property
    def bad(self) -> tuple[str, ...]:
        """The names of nodes unfit for a run, and `cluster` if nodes are missing; empty if the run may start."""
        return tuple(dict.fromkeys(f.node for f in self.findings if f.status == "bad"))

    def status(self, node: str, check: str) -> str:
        """Returns the status of a node in a check: ok, warn, bad, or – if unknown because the node did not answer."""
        states = {(f.check, f.status) for f in self.findings if f.node == node}
        for status in ("bad", "warn"):
            if (check, status) in states:
                return status
        return "–" if ("answers", "bad") in states and check != "answers" else "ok"

    def table(self) -> str:
        """Returns a table of nodes and checks, and a line for every finding (bad first), as text of several lines."""
        wide = max(len(name) for name in ("node", *self.nodes)) + 2
        rows = ["node".ljust(wide) + "".join(check.ljust(10) for check in self.checks)]
        for node in self.nodes:
            cells = (self.status(node, check) for check in self.checks)
            rows.append(node.ljust(wide) + "".join((c.upper() if c == "bad" else c).ljust(10) for c in cells))
        lines = [row.rstrip() for row in rows]
        order = sorted(self.findings, key=lambda f: (f.status != "bad", self._place(f.node)))
        lines += ["", *(f"{f.status}: {f.node}: {f.text}" for f in order)] if order else []
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns a single line: the number of nodes, the unfit nodes, the slowest and fastest rate, and the
        seconds."""
        rate = f", {min(self.gb_s):.2f} to {max(self.gb_s):.2f} GB/s between them" if self.gb_s else ""
        count = f"{len(self.nodes)} {'node' if len(self.nodes) == 1 else 'nodes'}"
        state = f"not fit: {', '.join(self.bad)}" if self.bad else "all fit"
        return f"preflight of {count}: {state}{rate}; {self.seconds:.1f} s"

    def values(self) -> dict[str, Any]:
        """Returns the report as JSON values, as in `preflight.json`: `fit` (true if no node is bad), `bad`, `nodes`
        (node → check → status), `findings`, `gb_s` and `seconds`."""
        return {
            "fit": not self.bad,
            "bad": list(self.bad),
            "nodes": {node: {check: self.status(node, check) for check in self.checks} for node in self.nodes},
            "findings": [asdict(f) for f in self.findings],
            "gb_s": list(self.gb_s),
            "seconds": self.seconds,
        }

    def _place(self, node: str) -> int:
        return self.nodes.index(node) if node in self.nodes else -1
