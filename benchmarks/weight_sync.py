"""Measures weight syncs over links of a known rate: this project's, and gather-then-broadcast, on the same tensors.

    .venv/bin/python benchmarks/weight_sync.py [--mbit 200] [--repeats 3] [--layout tp2_ep2]

Runs real processes, with a Linux network namespace for each simulated node (benchmarks/netns.py): two nodes with two
policy ranks each, and two nodes with two engine workers each; the four workers together hold a copy of the model (TP4).
benchmarks/weight_sync_rank.py describes the ways to sync. After every sync, each with new weights, all bytes received
by a worker are compared with the expected shard.

The link's limit is arithmetic on the two layouts, independent of any plan: the bytes needed by the workers of a node,
each counted once, must enter over the node's link; the bytes needed by all workers must leave over the policy's links.
The share is the time at the full rate divided by the measured time.

Prints a table and writes benchmarks/results/weight_sync.json and weight_sync.svg. Exits with 1 if a byte is wrong, the
share is below 0.85, the baseline takes less than 4 times as long, or the FP8 wire carries more than 0.55 of BF16's
bytes or is slower. Exits with 0 and a message if namespaces are not allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
from netns import Node, network, unavailable
from rich.console import Console
from rich.table import Table
from weight_sync_plot import write_plot
from weight_sync_rank import DTYPE, Scenario, shard_bytes

from skyrl_mega.parallel.box import Layout

RANKS_PER_NODE = 2
LAYOUTS = {
    # Every node holds every expert, as in the published recipes: the baseline gathers inside a node.
    "tp2_ep2": {"ranks": 4, "tensor": 2, "expert": 2},
    # Experts are split over both nodes, as necessary for a large model: the baseline also gathers over the network.
    "tp2_ep4": {"ranks": 4, "tensor": 2, "expert": 4},
}
WAYS = {"ours": "this project", "fp8": "with an FP8 wire", "baseline": "gather, then broadcast"}
SHARE_WANTED, RATIO_WANTED, FP8_WANTED = 0.85, 4.0, 0.55
RESULTS = Path(__file__).parent / "results"


def model(layers: int) -> dict[str, Any]:
    """Returns config.json of a small Qwen3-MoE, mostly experts; 88 MB in BF16 with 4 layers."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


class Ranks:
    """The processes of a scenario, each in its node; commands go to all, answers come from all.

    Raises:
        RuntimeError: A process ended or did not answer in time; the message holds the process's name and last output.
    """

    def __init__(self, scenario: Scenario, nodes: list[Node], logs: Path) -> None:
        self.scenario = scenario
        self.logs = [logs / f"{process}.log" for process in range(scenario.size)]
        # A process finds peers on the node's link; a single thread each, as there are more processes than cores.
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        script = str(Path(__file__).with_name("weight_sync_rank.py"))
        self.processes = [
            nodes[scenario.node(process)].run(
                [sys.executable, script, scenario.as_json(), str(process)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                env=environment,
                text=True,
            )
            for process, log in enumerate(self.logs)
        ]

    def tell(self, **command: Any) -> list[dict[str, Any]]:
        """Gives a command to all processes and returns all answers, in the processes' order."""
        for number, process in enumerate(self.processes):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failed(number, "has ended") from None
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Returns an answer of each process."""
        by_process: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.scenario.timeout_s + 10
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while len(by_process) < len(self.processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = next(n for n in range(len(self.processes)) if n not in by_process)
                    raise self._failed(silent, f"did not answer within {self.scenario.timeout_s + 10:g} s")
                for key, _ in ready:
                    pipe: IO[str] = key.fileobj  # type: ignore[assignment]
                    line = pipe.readline()
                    if not line:
                        raise self._failed(key.data, "ended without an answer")
                    by_process[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [by_process[number] for number in range(len(self.processes))]

    def _failed(self, number: int, what: str) -> RuntimeError:
        words = self.logs[number].read_text(errors="replace").strip().splitlines()[-5:]
        return RuntimeError("\n  ".join([f"{self.scenario.name(number)} {what}", *words]))


def link_bound_bytes(scenario: Scenario, source: Layout, target: Layout, nodes: int) -> int:
    """Returns the bytes that the busiest link cannot avoid: the largest of the bytes needed by any engine node, the
    needed bytes held by a single policy node only, and an equal share of all bytes to leave the policy's nodes.

    Counts element by element, without a plan.
    """
    policy_nodes = scenario.node(scenario.policy_ranks - 1) + 1
    needs = np.zeros(nodes, dtype=np.int64)
    alone = np.zeros(nodes, dtype=np.int64)
    for name, shape in source.tensors.items():
        held = np.zeros((nodes, *shape), dtype=bool)
        for first, layout in ((0, source), (scenario.policy_ranks, target)):
            for rank, shard in enumerate(layout.shards):
                for piece in shard.pieces:
                    if piece.tensor == name:
                        held[scenario.node(first + rank)][piece.box.slices()] = True
        holders = held[:policy_nodes].sum(0)
        for node in range(policy_nodes, nodes):
            needs[node] += held[node].sum()
            for holder in range(policy_nodes):
                alone[holder] += (held[node] & held[holder] & (holders == 1)).sum()
    fair = -(-int(needs.sum()) // policy_nodes)
    return max(int(needs.max()), int(alone.max()), fair) * DTYPE.itemsize


def measure(ranks: Ranks, nodes: list[Node], way: str, seed: int) -> dict[str, Any]:
    """Runs and checks a sync with new weights."""
    ranks.tell(do="prepare", seed=seed, fp8=way == "fp8")
    received, sent = [node.received() for node in nodes], [node.sent() for node in nodes]
    start = time.monotonic() + 0.3
    answers = ranks.tell(do=way, at=start)
    return {
        "seconds": max(answer["end"] for answer in answers) - start,
        "bytes_in": [node.received() - before for node, before in zip(nodes, received, strict=True)],
        "bytes_out": [node.sent() - before for node, before in zip(nodes, sent, strict=True)],
        "cpu_s": sum(answer["cpu_s"] for answer in answers),
        "wrong_bytes": sum(answer["wrong"] for answer in answers),
    }


def summary(runs: list[dict[str, Any]], bound_s: float, mbit: float) -> dict[str, Any]:
    """Returns medians of repeated syncs, and derived figures."""
    seconds = [run["seconds"] for run in runs]
    middle = statistics.median(seconds)
    bytes_in = np.median([run["bytes_in"] for run in runs], axis=0)
    bytes_out = np.median([run["bytes_out"] for run in runs], axis=0)
    return {
        "seconds": middle,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "bytes_in": bytes_in.astype(int).tolist(),
        "bytes_out": bytes_out.astype(int).tolist(),
        "share_of_limit": bound_s / middle,
        "busiest_link_in_use": max(bytes_in.max(), bytes_out.max()) * 8 / (mbit * 1e6) / middle,
        "cores_in_use": statistics.median(run["cpu_s"] for run in runs) / middle,
        "wrong_bytes": sum(run["wrong_bytes"] for run in runs),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all syncs in the same network; the ways alternate, to meet the same machine. Returns the figures."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {text}", flush=True)

    parallel = LAYOUTS[options.layout]
    count = (parallel["ranks"] + 4) // RANKS_PER_NODE
    with network(count, options.mbit) as nodes, tempfile.TemporaryDirectory(prefix="weight-sync-") as logs:
        scenario = Scenario(
            hf=model(options.layers),
            parallel=parallel,
            engine_tensor=4,
            engines=1,
            ranks_per_node=RANKS_PER_NODE,
            host=nodes[0].address,
            mbit=options.mbit,
            bucket_bytes=int(options.bucket_mib * 2**20),
            timeout_s=options.timeout,
        )
        say(f"{count} nodes, links of {options.mbit:g} Mbit/s; starting {scenario.size} processes")
        ranks = Ranks(scenario, nodes, Path(logs))
        source, target = scenario.layouts()
        bound_bytes = link_bound_bytes(scenario, source, target, count)
        bound_s = bound_bytes * 8 / (options.mbit * 1e6)
        copy_bytes = sum(int(np.prod(shape)) for shape in source.tensors.values()) * DTYPE.itemsize
        ranks.answers()
        say(f"model of {copy_bytes / 1e6:.0f} MB; the links allow a sync in {bound_s:.2f} s")
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for repeat in range(options.repeats):
            for turn, (way, title) in enumerate(WAYS.items()):
                measurement = measure(ranks, nodes, way, seed=1 + repeat * len(WAYS) + turn)
                runs[way].append(measurement)
                wrong = f", {measurement['wrong_bytes']} BYTES WRONG" if measurement["wrong_bytes"] else ""
                say(f"{title} {repeat + 1}/{options.repeats}: {measurement['seconds']:.2f} s{wrong}")
    ways = {way: summary(measurements, bound_s, options.mbit) for way, measurements in runs.items()}
    return {
        "mbit": options.mbit,
        "policy": parallel,
        "engines": {"count": 1, "tensor": 4},
        "nodes": [f"node{n} ({'policy' if n < count - 2 else 'engine'})" for n in range(count)],
        "model_bytes": copy_bytes,
        "worker_bytes": [shard_bytes(shard) for shard in target.shards],
        "bucket_bytes": scenario.bucket_bytes,
        "bound_bytes": bound_bytes,
        "bound_s": bound_s,
        # A broadcast's root must send the whole model at least once, in any pattern; gloo's tree sends more.
        "any_broadcast_s": copy_bytes * 8 / (options.mbit * 1e6),
        "ratio": ways["baseline"]["seconds"] / ways["ours"]["seconds"],
        "fp8_bytes": sum(ways["fp8"]["bytes_in"]) / sum(ways["ours"]["bytes_in"]),
        "fp8_seconds": ways["fp8"]["seconds"] / ways["ours"]["seconds"],
        "ways": ways,
        "runs": runs,
    }


def table(figures: dict[str, Any]) -> Table:
    """Returns a table with a column for each way."""
    ways = [figures["ways"][way] for way in WAYS]
    shown = Table(title=f"weight sync, {figures['model_bytes'] / 1e6:.0f} MB, links of {figures['mbit']:g} Mbit/s")
    shown.add_column("")
    for title in WAYS.values():
        shown.add_column(title, justify="right")
    shown.add_row("seconds, median", *(f"{w['seconds']:.2f}" for w in ways))
    shown.add_row("seconds, all", *(f"{w['seconds_min']:.2f}–{w['seconds_max']:.2f}" for w in ways))
    for n, name in enumerate(figures["nodes"]):
        shown.add_row(f"MB into {name}", *(f"{w['bytes_in'][n] / 1e6:.1f}" for w in ways))
    for n, name in enumerate(figures["nodes"]):
        shown.add_row(f"MB out of {name}", *(f"{w['bytes_out'][n] / 1e6:.1f}" for w in ways))
    limit = f"share of BF16's limit ({figures['bound_s']:.2f} s)"
    shown.add_row(limit, *(f"{w['share_of_limit']:.1%}" for w in ways))
    shown.add_row("busiest link in use", *(f"{w['busiest_link_in_use']:.1%}" for w in ways))
    shown.add_row(f"cores in use, of {os.cpu_count()}", *(f"{w['cores_in_use']:.2f}" for w in ways))
    shown.add_row("wrong bytes", *(str(w["wrong_bytes"]) for w in ways))
    return shown


def main() -> int:
    """Measures, prints, writes. See the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200, help="rate of every link, megabits a second each way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layout", choices=LAYOUTS, default="tp2_ep2", help="of the policy")
    parser.add_argument("--layers", type=int, default=4, help="of the model; 21 MB each in BF16")
    parser.add_argument("--bucket-mib", type=float, default=4, help="size of one message")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one step may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of weight_sync.json and weight_sync.svg")
    options = parser.parse_args()
    if reason := unavailable():
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the network is removed then too
    figures = run(options)
    Console(width=None if sys.stdout.isatty() else 100).print(table(figures))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "weight_sync.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_plot(figures, WAYS, options.results / "weight_sync.svg")
    share, ratio = figures["ways"]["ours"]["share_of_limit"], figures["ratio"]
    print(
        f"{ratio:.1f} times as fast as the baseline (wanted {RATIO_WANTED:g}), {share:.1%} of the links' limit", end=" "
    )
    print(f"(wanted {SHARE_WANTED:.0%}); no broadcast can be faster than {figures['any_broadcast_s']:.2f} s")
    print(
        f"FP8 wire: {figures['fp8_bytes']:.2f} of the bytes (wanted {FP8_WANTED:g}), {figures['fp8_seconds']:.2f} of "
        "the time (wanted 1)"
    )
    wrong = sum(figures["ways"][way]["wrong_bytes"] for way in WAYS)
    fp8 = figures["fp8_bytes"] <= FP8_WANTED and figures["fp8_seconds"] <= 1
    return 0 if not wrong and share >= SHARE_WANTED and ratio >= RATIO_WANTED and fp8 else 1


if __name__ == "__main__":
    sys.exit(main())
