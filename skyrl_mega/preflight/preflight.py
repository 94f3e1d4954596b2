"""Runs a whole preflight on the Ray cluster of this process."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.errors import ClusterError, describe
from skyrl_mega.cluster.nodes import missing_kind, worker_nodes
from skyrl_mega.config.pools import engine_cluster, label_of, labelled_nodes, total_nodes
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.cluster import TopologyConfig
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.host_memory import disk
from skyrl_mega.preflight import fabric, gpus, model, network, paths, versions
from skyrl_mega.preflight.finding import NodeProblem
from skyrl_mega.preflight.probe import Probe, ProbeSettings
from skyrl_mega.preflight.report import COLUMNS, PreflightReport
from skyrl_mega.preflight.run_inputs import model_config
from skyrl_mega.telemetry.console import Console

MESSAGE_MIB = {"cuda": 256, "cpu": 16}
"""Size of a message between neighbours in MiB, by device."""
START_S = 60.0
"""Maximum seconds for Ray to start an actor's process on a node."""
SLACK_S = 10.0
"""Additional seconds for a call beyond the time limit of its process."""


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster."""

    id: str
    """Ray's id of the node."""
    name: str
    """Address; with a number if several nodes share an address (in tests)."""
    address: str
    """IP address."""
    gpus: bool = True
    """True if Ray sees GPUs. Nodes without GPUs, besides those requested by the run, host environments."""
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Labels in Ray."""

    def apart(self, config: Config) -> bool:
        """Returns True if the node belongs to the pool `cluster.pools.engines`; False without a pool."""
        pool = config.cluster.pools.engines
        if pool is None:
            return False
        key, value = label_of(pool)
        return self.labels.get(key) == value


def before_run(config: Config, path: Path, folder: Path, console: Console) -> None:
    """Runs a preflight if `cluster.preflight` is always, or auto on GPUs, and writes the report to `preflight.json`,
    replacing an earlier one; else does nothing.

    Args:
        config: The settings, with `cluster.device` decided.
        path: The model's folder.
        folder: The run's folder, which exists, for the report.
        console: Prints the findings.

    Raises:
        ClusterError: A node is unfit, or nodes are missing. Names all unfit nodes and a cause; the report is written.
        UserError: The model's config.json is missing here or of an unsupported type.
        OSError: The report cannot be written.
    """
    wanted = config.cluster.preflight
    if wanted == "never" or (wanted == "auto" and config.cluster.device != "cuda"):
        return
    with console.phase("preflight"):
        report = preflight(config, path, folder, config.cluster.device)
    (folder / "preflight.json").write_text(json.dumps(report.values(), indent=1) + "\n")
    if report.findings:
        console.say(report.table())
    console.say(report.summary())
    if report.bad:
        worst = next(f for f in report.findings if f.status == "bad")
        raise ClusterError(f"{report.summary()}: {worst.node}: {worst.text}")


def preflight(config: Config, path: Path, folder: Path, device: str) -> PreflightReport:
    """Checks all nodes of the connected Ray cluster at once and returns the report.

    Starts an actor on every node and ends all of them. A failed check is a finding, not an error. Ends within a few
    times `cluster.preflight_timeout_s`, even if a check hangs. Raises UserError if the model's config.json is missing
    here, unless the run builds the model, or of an unsupported type.

    Args:
        config: The run's settings.
        path: The model's folder, expected on every node unless the run builds the model.
        folder: The run's folder, which exists here.
        device: `cpu` or `cuda`.
    """
    start = time.perf_counter()
    timeout = config.cluster.preflight_timeout_s
    nodes = cluster_nodes()
    names = tuple(node.name for node in nodes)
    has_model = path.exists() or not config.model.build
    settings = ProbeSettings(
        folder.absolute(), path.absolute() if has_model else None, secrets.token_hex(6), device, timeout
    )
    probes = _Probes(nodes, settings)
    rates: list[network.PairRate] = []
    try:
        gathered, errors = probes.call("gather", dict.fromkeys(names, ()), timeout + START_S)
        findings = [NodeProblem(n, "answers", "bad", _text(errors[n])) for n in names if n in errors]
        needed = needed_nodes(nodes, config, device)
        if text := _missing_nodes([node for node in nodes if node.name in needed], config):
            findings.insert(0, NodeProblem("cluster", "answers", "bad", text))
        facts = _by_kind(gathered, findings)
        findings += versions.check(facts["versions"])
        findings += model.check(facts["model"], path)
        if device == "cuda":
            gpu_facts = {node: f for node, f in facts["gpus"].items() if node in needed}
            apart = {node.name for node in nodes if node.apart(config)}
            for cluster, kind in ((config.cluster, needed - apart), (engine_cluster(config), apart)):
                findings += gpus.check({n: f for n, f in gpu_facts.items() if n in kind}, cluster.gpus_per_node)
            drivers = {node: {"driver": f.driver} for node, f in gpu_facts.items() if f.driver}
            findings += versions.check(drivers)
            fabric_facts = {node: f for node, f in facts["fabric"].items() if node in needed}
            findings += fabric.check(fabric_facts) if len(needed) > 1 else []
        writers = [node for node, f in facts["paths"].items() if not f.errors]
        unseen, _ = probes.call("unseen", dict.fromkeys(writers, (writers,)), timeout)
        findings += paths.check_shared(facts["paths"], unseen, settings.run)
        findings += paths.check_room(facts["paths"], settings.run, checkpoint_bytes(config, path))
        reach_findings, rates = _network(probes, list(gathered), needed, settings)
        findings += reach_findings
        if not reach_findings:
            findings += network.check_rates(
                rates, _expected_rate(config, facts["fabric"]) if device == "cuda" else None
            )
    finally:
        probes.end()
        paths.remove(settings.run, settings.token)
    enabled = {"gpus": device == "cuda", "network": len(nodes) > 1, "model": has_model}
    checks = tuple(check for check in COLUMNS if enabled.get(check, True))
    speeds = tuple(pair.gb_s for pair in rates if pair.gb_s is not None)
    return PreflightReport(names, checks, tuple(findings), time.perf_counter() - start, speeds)


def needed_nodes(nodes: Sequence[ClusterNode], config: Config, device: str) -> set[str]:
    """Returns the names of the nodes for ranks and engines: with device `cuda` the nodes with GPUs, else all.

    If fewer nodes have GPUs than the settings want, returns all nodes, to find the problems of the others.
    """
    with_gpus = {node.name for node in nodes if node.gpus}
    if device != "cuda" or len(with_gpus) < total_nodes(config):
        return {node.name for node in nodes}
    return with_gpus


def _missing_nodes(nodes: Sequence[ClusterNode], config: Config) -> str:
    """Returns a sentence if there are too few nodes for the run, or too few of a kind; else ""."""
    if len(nodes) < (wanted := total_nodes(config)):
        return f"Ray has {len(nodes)} nodes, cluster.nodes wants {wanted}; start the others, or give fewer nodes"
    lacking = missing_kind([node.labels for node in nodes], wanted, labelled_nodes(config))
    return f"Ray has {lacking}; start the others, or change cluster.pools.engines" if lacking else ""


def cluster_nodes() -> list[ClusterNode]:
    """Returns the nodes of the connected Ray cluster that are alive and have CPUs, ordered by address. A node is named
    by its address, with `#0`, `#1`, … if several nodes have the same address."""
    nodes = worker_nodes()
    addresses = [node.address for node in nodes]
    several = Counter(addresses)
    return [
        ClusterNode(node.id, a if several[a] == 1 else f"{a}#{addresses[:i].count(a)}", a, bool(node.gpus), node.labels)
        for i, (node, a) in enumerate(zip(nodes, addresses, strict=True))
    ]


def checkpoint_bytes(config: Config, path: Path) -> int:
    """Returns the maximum bytes of the run's checkpoints on disk, over all nodes: all kept checkpoints, and the next
    while being written. 0 for a run without checkpoints.

    Args:
        config: The settings.
        path: The model's folder. If the folder does not exist, the config of `model.build` is used.

    Raises:
        UserError: The folder has no config.json; the folder and `model.build` are both missing; or the model's type is
            not supported.
    """
    hf = read_config(path) if path.exists() else model_config(config)
    return disk(config, architecture(hf).describe(hf)).kept


def _expected_rate(config: Config, adapters: Mapping[str, fabric.FabricFacts]) -> network.ExpectedRate:
    """Returns the expected network rate; the default of `nic_gb_s` is an expectation only if a node has suitable
    adapters."""
    gb_s = config.cluster.topology.nic_gb_s
    return network.ExpectedRate(gb_s, gb_s != TopologyConfig().nic_gb_s or any(f.adapters for f in adapters.values()))


class _Probes:
    """Probe actors on all nodes."""

    def __init__(self, nodes: Sequence[ClusterNode], settings: ProbeSettings) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Ray otherwise hides the GPUs of a cluster started without our settings.
        sees = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}} if settings.device == "cuda" else None
        remote = ray.remote(Probe)
        self.addresses = {node.name: node.address for node in nodes}
        self._actors = {
            node.name: remote.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env=sees,
            ).remote(settings, node.name, node.address)
            for node in nodes
        }

    def call(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]], timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Calls a method of several probes at once. Returns the answers, and the errors of probes that failed or were
        late."""
        import ray

        refs = {getattr(self._actors[node], method).remote(*given): node for node, given in arguments.items()}
        ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        answers: dict[str, Any] = {}
        errors: dict[str, Exception] = {refs[r]: TimeoutError(f"no answer within {timeout_s:g} s") for r in late}
        for ref in ready:
            try:
                answers[refs[ref]] = ray.get(ref)
            except Exception as error:  # any error of a node is a finding about it
                errors[refs[ref]] = error
        return {node: answers[node] for node in arguments if node in answers}, errors

    def end(self) -> None:
        """Ends the actors."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)


def _by_kind(gathered: Mapping[str, Mapping[str, Any]], findings: list[NodeProblem]) -> dict[str, dict[str, Any]]:
    """Returns the facts by kind and node; adds a finding for each kind a node could not determine."""
    facts: dict[str, dict[str, Any]] = {"versions": {}, "model": {}, "paths": {}, "gpus": {}, "fabric": {}}
    for node, kinds in gathered.items():
        for kind, fact in kinds.items():
            if isinstance(fact, Exception):
                findings.append(NodeProblem(node, kind, "bad", _text(fact)))
            else:
                facts[kind][node] = fact
    return facts


def _network(
    probes: _Probes, names: list[str], needed: Collection[str], settings: ProbeSettings
) -> tuple[list[NodeProblem], list[network.PairRate]]:
    """Checks that all nodes reach each other; then measures the exchange between neighbours among the nodes of ranks
    and engines."""
    if len(names) < 2:
        return [], []
    device, timeout_s = settings.device, settings.timeout_s
    endpoints, errors = probes.call("start_listener", dict.fromkeys(names, ()), timeout_s)
    unreached, late_errors = probes.call(
        "connect", {n: ({o: b for o, b in endpoints.items() if o != n},) for n in endpoints}, timeout_s
    )
    findings = [NodeProblem(n, "network", "bad", _text(e)) for n, e in (errors | late_errors).items()]
    findings += network.check_reach(list(endpoints), unreached)
    if findings:
        return findings, []
    pairs: list[network.PairRate] = []
    for round_pairs in network.pairs([name for name in names if name in needed]):
        ports, errors = probes.call("open_exchange", {first: () for first, _ in round_pairs}, timeout_s)
        arguments: dict[str, tuple[Any, ...]] = {}
        for first, second in round_pairs:
            if first in ports:
                leader = (probes.addresses[first], ports[first])
                arguments |= {n: (n == first, leader, MESSAGE_MIB[device], timeout_s) for n in (first, second)}
        rates, failed = probes.call("exchange", arguments, timeout_s + SLACK_S)
        for first, second in round_pairs:
            causes = [e for n in (first, second) if (e := failed.get(n) or errors.get(n))]
            # A broken end explains more than the end waiting for it.
            causes.sort(key=lambda e: "no answer within" in str(e))
            if causes:
                pairs.append(network.PairRate(first, second, None, _text(causes[0])))
            else:
                pairs.append(network.PairRate(first, second, min(rates[first], rates[second])))
    return [], pairs


def _text(error: Exception) -> str:
    """Returns an error as a single line; errors other than time-outs with their type."""
    return str(error) if isinstance(error, TimeoutError) else describe(error)
