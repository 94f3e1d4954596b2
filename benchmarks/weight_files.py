"""Weights by files: bits after kills, bytes of real steps, seconds over a slow link.

    .venv/bin/python -m benchmarks.weight_files [kills|steps|link …]

`kills` publishes 50 random steps in each of four layouts, with 20 kills of writers and readers at random moments, and
compares every bit. `steps` runs the quickstart's model and reads the bytes of every sync from the run's metrics. `link`
reads over 100 Mbit/s with 50 ms, in network namespaces. Writes benchmarks/results/weight_files.json; exits with 1 if a
bit differs or a run fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.netns import network, unavailable
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims
from tests.support.weight_files import Policy, Worker, local, random_weights, step, workers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "weight_files.json"
LAYOUTS = [
    (ParallelDims(ranks=1), (1, False)),
    (ParallelDims(ranks=4, pipeline=2, expert=2), (2, False)),
    (ParallelDims(ranks=4, tensor=2, expert=2, expert_tensor=2), (2, True)),
    (ParallelDims(ranks=4, tensor=2, pipeline=2, expert=2), (1, False)),
]
"""Layouts of the policy, each with tensor size and expert parallelism of the engine."""
STEPS, KILLS, FULL_EVERY = 50, 20, 10
ANSWER_S = 120.0
MBIT, DELAY_MS = 100.0, 50.0
FORK = multiprocessing.get_context("fork")


# ---- kills ---------------------------------------------------------------------------------------------------------


class Child:
    """A process that answers requests until it is killed."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self.pipe, other = FORK.Pipe()
        self.process = FORK.Process(target=work, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def ask(self, request: Any, kill_after_s: float | None = None) -> Any:
        """Returns the answer to a request; None if the process was killed after `kill_after_s` without an answer."""
        self.pipe.send(request)
        if self.pipe.poll(ANSWER_S if kill_after_s is None else kill_after_s):
            return self.pipe.recv()
        if kill_after_s is None:
            raise RuntimeError(f"no answer to {request} within {ANSWER_S:g} s")
        self.process.kill()
        self.process.join()
        return None

    def end(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.join()


def writer(pipe: Connection, hf: dict[str, Any], parallel: ParallelDims, folder: Path, weights: Any) -> None:
    """Publishes the weights after each requested step: a policy's process."""
    policy, done = Policy(hf, parallel, "bfloat16", str(folder / "store"), folder / "plans"), False
    while True:
        number = pipe.recv()
        if done:
            step(weights, 0.02, generator_of(number))
        done = True  # the parent has taken the first step before the fork
        pipe.send(policy.publish(weights, full=number % FULL_EVERY == 0))


def reader(pipe: Connection, hf: dict[str, Any], kind: tuple[int, bool], index: int, folder: Path) -> None:
    """Fetches the requested publications and answers with a digest of the worker's parameters: an engine worker."""
    shard = architecture(hf).engine_layout(hf, kind[0], 1, kind[1]).shards[index]
    worker = Worker(hf, shard, "bfloat16", folder / f"cache-{index}" / "worker.image")
    while True:
        worker.fetch(str(folder / "store"), pipe.recv())
        pipe.send(digest(worker.installed()))


def digest(params: Mapping[str, Tensor]) -> str:
    """Returns a digest of all bits."""
    hashed = hashlib.sha256()
    for name in sorted(params):
        hashed.update(params[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def generator_of(number: int) -> torch.Generator:
    """Returns the generator of a step."""
    return torch.Generator().manual_seed(number)


def kills() -> dict[str, Any]:
    """Publishes and reads in every layout while writers and readers are killed; returns counts."""
    torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
    hf, chance = hf_config(BuildConfig(architecture="qwen3_moe", hidden=128, experts=8, layers=2)), random.Random(0)
    each = KILLS // len(LAYOUTS)
    counts = {"compared": 0, "different": 0, "writers_killed": 0, "readers_killed": 0, "too_late": 0}
    for place, (parallel, kind) in enumerate(LAYOUTS):
        with tempfile.TemporaryDirectory() as folder:
            killed = set(chance.sample(range(STEPS - 10), each))
            _layout(hf, parallel, kind, Path(folder), killed, chance, counts)
        print(f"layout {place + 1} of {len(LAYOUTS)}: {counts}", flush=True)
    return {"layouts": len(LAYOUTS), "steps": STEPS, **counts}


def _layout(
    hf: dict[str, Any],
    parallel: ParallelDims,
    kind: tuple[int, bool],
    folder: Path,
    killed: set[int],
    chance: random.Random,
    counts: dict[str, int],
) -> None:
    weights = random_weights(hf, generator_of(10**6))
    shards = architecture(hf).engine_layout(hf, kind[0], 1, kind[1]).shards
    read = [Child(reader, hf, kind, index, folder) for index in range(len(shards))]
    write: Child | None = None
    usual = {"writer": 0.2, "reader": 0.1}
    for number in range(STEPS):
        step(weights, 0.02, generator_of(number))
        victim = chance.choice(["writer", "reader"]) if number in killed else ""
        name = None
        while name is None:
            write = write or Child(writer, hf, parallel, folder, weights)
            delay = chance.uniform(0, usual["writer"]) if victim == "writer" else None
            start = time.monotonic()
            name = write.ask(number, delay)
            if victim == "writer":
                counts["writers_killed" if name is None else "too_late"] += 1
                killed |= {_next(number, killed)} if name else set()
                victim = ""
            if name is None:
                write = None
            else:
                usual["writer"] = time.monotonic() - start
        for index, shard in enumerate(shards):
            found, start = None, time.monotonic()
            if victim == "reader" and index == 0:
                found = read[0].ask(name, chance.uniform(0, usual["reader"]))
                counts["readers_killed" if found is None else "too_late"] += 1
                killed |= {_next(number, killed)} if found else set()
                if found is None:
                    read[0] = Child(reader, hf, kind, 0, folder)
            found = found or read[index].ask(name)
            usual["reader"] = time.monotonic() - start
            counts["compared"] += 1
            counts["different"] += found != digest(local(shard, weights, torch.bfloat16))
    for child in [*read, *([write] if write else [])]:
        child.end()


def _next(number: int, killed: set[int]) -> int:
    """Returns the next step without a kill, for a kill that came too late."""
    return next(later for later in range(number + 1, 2 * STEPS) if later not in killed)


# ---- bytes of real steps -------------------------------------------------------------------------------------------

RUNS = {
    "bfloat16 at 1e-6": ["model.dtype=bfloat16", "policy.optimizer.lr=1e-6"],
    "bfloat16 at the quickstart's 2e-4": ["model.dtype=bfloat16", "policy.optimizer.lr=2e-4"],
    "float32 at the quickstart's 2e-4": ["model.dtype=float32", "policy.optimizer.lr=2e-4"],
}
"""Runs with float32 master weights: name → settings."""
RL_STEPS = 8
METRICS = ("sync/files/bytes_written", "sync/files/share", "sync/files/changed", "sync/files/full")


def steps() -> dict[str, Any]:
    """Runs RL steps of the quickstart with weights by files; returns bytes of every sync."""
    measured = {}
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "skyrl_mega.launch", "--config", "configs/quickstart.yaml"]
            command += [f"run.directory={folder}", "run.name=files", f"run.steps={RL_STEPS}", "checkpoint.every=0"]
            command += ["evaluation.every=0", "warmup.steps=100", "policy.optimizer.warmup_steps=0"]
            command += ["algorithm.dynamic_sampling.enabled=false"]
            command += ["weights.transport=files", "weights.files.full_every=100", *settings]
            subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.DEVNULL)
            lines = (Path(folder) / "files" / "metrics.jsonl").read_text().splitlines()
        rows = [row for line in lines if METRICS[0] in (row := json.loads(line))]
        changes = [row for row in rows if not row["sync/files/full"]]
        measured[name] = {
            "steps": len(changes),
            "share_of_image": [row["sync/files/share"] for row in changes],
            "changed": [row["sync/files/changed"] for row in changes],
            "bytes": [row["sync/files/bytes_written"] for row in changes],
        }
        print(f"{name}: {measured[name]}", flush=True)
    return measured


# ---- a slow link ---------------------------------------------------------------------------------------------------


class Ranges(BaseHTTPRequestHandler):
    """Serves byte ranges of the files of a folder, like an object store, `DELAY_MS` away: every connection and every
    answer waits so long. (Not every kernel has `netem`, which would delay packets.)"""

    protocol_version = "HTTP/1.1"
    folder = Path()

    def setup(self) -> None:
        """Accepts a connection."""
        time.sleep(DELAY_MS / 1000)
        super().setup()

    def do_HEAD(self) -> None:
        """Answers with the size of a file."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """Answers with a file, or a range of a file."""
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        file = self.folder / self.path.lstrip("/")
        time.sleep(DELAY_MS / 1000)
        if not file.is_file():
            self.send_error(404)
            return
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2] or len(data) - 1)) if asked else (0, len(data) - 1)
        part = data[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def serve(folder: str, address: str) -> None:
    """Serves a folder until the end of the process."""
    Ranges.folder = Path(folder)
    ThreadingHTTPServer((address, 8000), Ranges).serve_forever()


def read(address: str, hf: str, *names: str) -> None:
    """Fetches publications one after another, and prints seconds and bytes of each."""
    (worker,) = workers(json.loads(hf), 1, dtype="bfloat16")
    for name in names:
        report = worker.fetch(address, name)
        print(json.dumps({"seconds": report.seconds, "bytes": report.read, "full": report.full}), flush=True)


def link() -> dict[str, Any]:
    """Reads a full image and the changes of a step over a slow link."""
    if reason := unavailable():
        raise SystemExit(reason)
    build = BuildConfig(architecture="qwen3_moe", hidden=512, experts=16, layers=4, expert_ffn=512)
    hf = hf_config(build)
    weights = random_weights(hf, generator_of(0))
    with tempfile.TemporaryDirectory() as folder, network(2, MBIT) as nodes:
        policy = Policy(hf, ParallelDims(ranks=1), "bfloat16", f"{folder}/store", Path(folder) / "plans")
        names = [policy.publish(weights)]
        for tensor in weights.values():  # master weights move by up to a millionth
            tensor.add_(1e-6 * (2 * torch.rand(tensor.shape, generator=generator_of(1)) - 1))
        names.append(policy.publish(weights))
        changed = policy.reports[0].changed / policy.reports[0].elements
        address = nodes[0].address
        this = [sys.executable, "-m", "benchmarks.weight_files"]
        nodes[0].run([*this, "serve", policy.folder, address], cwd=ROOT)
        time.sleep(15)  # both import torch
        child = nodes[1].run(
            [*this, "read", f"http://{address}:8000", json.dumps(hf), *names], cwd=ROOT, stdout=subprocess.PIPE
        )
        out, _ = child.communicate(timeout=600)
        full, changes = (json.loads(line) for line in out.splitlines())
    plain = sum(tensor.numel() * 2 for tensor in weights.values())
    return {"mbit": MBIT, "delay_ms": DELAY_MS, "model_bytes": plain, "changed": changed, "full": full, "step": changes}


def main() -> int:
    """Runs the parts given on the command line, all by default."""
    if sys.argv[1:2] in (["serve"], ["read"]):
        globals()[sys.argv[1]](*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["kills", "steps", "link"])
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in parser.parse_args().parts:
        results[part] = {"kills": kills, "steps": steps, "link": link}[part]()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(part, json.dumps(results[part]))
    return int(bool(results.get("kills", {}).get("different")))


if __name__ == "__main__":
    sys.exit(main())
