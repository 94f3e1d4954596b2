"""A transfer plan and the cost as a readable table and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from skyrl_mega.common.tables import aligned, as_ranges
from skyrl_mega.weights.plan.cost import GB, Cost, HostTime, imbalance
from skyrl_mega.weights.plan.plan import Plan

MAX_NODES = 40
"""Maximum number of nodes in the table."""


def identity(plan: Plan, wire: str) -> dict[str, Any]:
    """Returns the values for comparing two runs' plans: `digest`, `wire`, `bytes_in_max` (largest number of bytes
    received by an engine worker), and `devices`, the device numbers of `policy` ranks and `engines` workers.

    Args:
        plan: The plan.
        wire: User-facing description of the wire's types (`sync_plan.wire_text`).
    """
    return {
        "digest": plan.digest,
        "wire": wire,
        "bytes_in_max": max(plan.bytes_in),
        "devices": {"policy": list(plan.topology.sources), "engines": list(plan.topology.targets)},
    }


def values(plan: Plan, count: Cost, host: HostTime, seconds: float, wire: str) -> dict[str, Any]:
    """Returns all values of the plan's report, for JSON: those of `identity`; `policy_ranks`, `engine_ranks`, `parts`
    and `routes` (numbers); `planning_seconds`, `predicted_seconds`, `host_seconds`, `sync_seconds`, `bound_seconds` and
    `seconds` by kind of link; `nic_imbalance`; and `bytes`, with sums and lists by rank, NIC, device and node.

    Args:
        plan: The plan.
        count: Bytes by link (`cost`).
        host: Core seconds of the busiest process (`host_time`).
        seconds: Planning time in seconds.
        wire: User-facing description of the wire's types.
    """
    links = count.predicted
    return {
        **identity(plan, wire),
        "policy_ranks": plan.sources,
        "engine_ranks": plan.targets,
        "parts": len(plan.parts),
        "routes": len(plan.routes),
        "planning_seconds": seconds,
        "predicted_seconds": links,
        "host_seconds": asdict(host),
        # Added up: a device owner and its peers do not overlap links and host.
        "sync_seconds": {"first": links + host.first, "later": links + host.later, "checksums": links + host.checksums},
        "bound_seconds": count.bound,
        "seconds": count.seconds,
        "nic_imbalance": {"out": imbalance(count.nic_out), "in": imbalance(count.nic_in)},
        "bytes": {
            "network": int(count.nic_in.sum()),
            "fabric": int(count.fabric_in.sum()),
            "local": int(count.local.sum()),
            "node_out": count.node_out.tolist(),
            "node_in": count.node_in.tolist(),
            "nic_out": count.nic_out.tolist(),
            "nic_in": count.nic_in.tolist(),
            "device_fabric_out": count.fabric_out.tolist(),
            "device_fabric_in": count.fabric_in.tolist(),
            "device_local": count.local.tolist(),
            "policy_rank_out": count.rank_out.tolist(),
            "engine_rank_in": count.rank_in.tolist(),
        },
    }


def table(plan: Plan, count: Cost, host: HostTime, seconds: float) -> str:
    """Returns the plan's report as a readable table of several lines: the first `MAX_NODES` nodes, the ranks in sum,
    totals and times.

    Args:
        plan: The plan.
        count: Bytes by link (`cost`).
        host: Core seconds of the busiest process (`host_time`).
        seconds: Planning time in seconds.
    """
    t = plan.topology
    policy, engines = t.node(np.array(t.sources)), t.node(np.array(t.targets))
    rows: list[Sequence[str]] = [
        ("node", "policy", "engines", "NIC out GB", "mean", "max", "NIC in GB", "mean", "max", "in node GB", "local GB")
    ]
    for node in range(min(t.nodes, MAX_NODES)):
        nics = slice(node * t.nics_per_node, (node + 1) * t.nics_per_node)
        gpus = slice(node * t.per_node, (node + 1) * t.per_node)
        row = [
            str(node),
            as_ranges(np.flatnonzero(policy == node).tolist()),
            as_ranges(np.flatnonzero(engines == node).tolist()),
        ]
        for carried in (count.nic_out[nics], count.nic_in[nics]):
            row += [_gb(carried.sum()), _gb(carried.mean()), _gb(carried.max())]
        rows.append((*row, _gb(count.fabric_in[gpus].sum()), _gb(count.local[gpus].sum())))
    omitted = [f"… and {t.nodes - MAX_NODES} more nodes (--json has all)"] if t.nodes > MAX_NODES else []
    ranks: list[Sequence[str]] = [("GB per rank", "min", "mean", "max")]
    for name, carried in (("policy rank sends", count.rank_out), ("engine worker receives", count.rank_in)):
        ranks.append((name, _gb(carried.min()), _gb(carried.mean()), _gb(carried.max())))
    slowest = max(count.seconds, key=lambda kind: count.seconds[kind])
    lines = [
        *aligned(rows, indent=""),
        *omitted,
        "",
        *aligned(ranks, indent=""),
        "",
        f"network {_gb(count.nic_in.sum())} GB, within nodes {_gb(count.fabric_in.sum())} GB, within devices "
        f"{_gb(count.local.sum())} GB",
        f"busiest NIC over mean: out {imbalance(count.nic_out):.3f}, in {imbalance(count.nic_in):.3f}",
        f"{len(plan.parts)} parts on {len(plan.routes)} routes, planned in {seconds:.2f} s",
        f"predicted {count.predicted:.4f} s ({slowest.replace('_', ' ')}), lower bound {count.bound:.4f} s",
        f"host time in addition: {host.first:.2f} s in the first sync, {host.later:.3f} s later, "
        f"{host.checksums:.3f} s with checksums",
    ]
    return "\n".join(lines)


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.3f}"
