"""Sends signals at random moments of a real run, including the start, and reports each exit and all leftovers.

    .venv/bin/python -m benchmarks.signals [--count 40] [--seed 0] [--length SECONDS]

A small quickstart run is started again and again, and gets SIGTERM, SIGINT or SIGUSR1 at a moment drawn uniformly from
the length of an undisturbed run. The length counts from the moment when the command handles signals, immediately after
the start of Python. Every fourth run starts without data and model. Each must end with exit code 75 and a line on
standard error, and leave no process, port, shared memory, temporary file, partial file or lock. To exclude this
machine's other processes, everything runs in separate namespaces with an empty /tmp and /dev/shm, which needs root or
user namespaces. Takes about half a minute per signal on 2 cores; benchmarks/results/signals.json keeps the last result.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.trainer import quickstart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "signals.json"
SETTINGS = (
    *("run.steps=20", "run.epochs=10", "warmup.steps=4", "checkpoint.every=2"),
    *("evaluation.every=5", "evaluation.limit=16", "data.prompts_per_step=16", "rollout.kv_cache_gib=0.1"),
    "algorithm.dynamic_sampling.enabled=false",  # every step trains, for any rewards
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LINE = "stopped by {}; the same command resumes from the newest checkpoint, if there is one\n"
LIMIT_S = 300.0
LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""
INSIDE = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec "$@"'


def isolated(arguments: list[str]) -> list[str]:
    """Returns the command to run this program with these arguments, isolated from other processes."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    spaces = ["unshare", *user, "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    command = [sys.executable, "-m", "benchmarks.signals", "--inside", *arguments]
    return [*spaces, "sh", "-c", INSIDE, "sh", *command]


def left(work: Path) -> list[str]:
    """Returns everything left besides this process and its folder."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                processes.append(f"process {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:80]}")
        except OSError:  # the process ended meanwhile
            continue
    sockets = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    ports = [f"port {int(words[1].rpartition(':')[2], 16)}" for words in sockets if words[3] == LISTENING]
    files = [str(p) for place in ("/tmp", "/dev/shm") for p in Path(place).iterdir() if p != work]
    hidden = [p for p in work.rglob("*") if p.name.startswith(".") or p.suffix == ".partial"]
    partial = [str(p) for p in hidden if p.name != ".lock"]
    for lock in work.glob("*/.lock"):
        with lock.open() as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                partial.append(f"lock {lock}")
    return processes + ports + files + partial


def started(work: Path, name: str) -> subprocess.Popen[str]:
    """Starts a run and waits until signals are handled."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "torch")}
    env |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hides torch's warning on a machine without host names
    command = quickstart.command(work, *SETTINGS, f"run.name={name}")
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.partition("SigBlk:")[2].split()[0], 16) >> (signal.SIGUSR1 - 1) & 1:
            break
    return process


def attempt(work: Path, name: str, number: signal.Signals, moment_s: float) -> dict[str, Any]:
    """Runs, sends a signal, and returns the result."""
    process = started(work, name)
    try:
        process.wait(moment_s)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    else:  # this run was faster than the undisturbed run
        return attempt(work, f"{name}-", number, moment_s / 2)
    sent = time.monotonic()
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        errors += f"no end within {LIMIT_S:g} s"
    seconds, remains = time.monotonic() - sent, left(work)
    # Data preparation prints its progress there.
    messages = "".join(line for line in errors.splitlines(True) if not line.endswith(" rows\n"))
    good = process.returncode == 75 and messages == LINE.format(number.name) and "Traceback" not in out and not remains
    output_lines = out.strip().splitlines()
    result = {
        "signal": number.name,
        "moment_s": round(moment_s, 2),
        "during": output_lines[-1].strip() if output_lines else "start-up",
    }
    result |= {"code": process.returncode, "seconds": round(seconds, 2), "left": remains, "good": good}
    return result if good else result | {"errors": errors, "out": out}


def undisturbed(work: Path) -> float:
    """Returns the duration of an undisturbed run in seconds.

    Raises:
        RuntimeError: The exit code was not 0, or something was left.
    """
    began = time.monotonic()
    whole = started(work, "whole")
    out, errors = whole.communicate(timeout=LIMIT_S)
    remains = left(work)
    if whole.returncode or remains:
        raise RuntimeError(f"the undisturbed run ended with {whole.returncode}\n{out}{errors}left: {remains}")
    return time.monotonic() - began


def inside(count: int, seed: int, length: float | None) -> int:
    """Sends all signals, inside the namespaces."""
    work, draw, keep = Path("/tmp/work"), random.Random(seed), length is None
    work.mkdir()
    length = length or undisturbed(work)
    print(f"moments up to {length:.1f} s", flush=True)
    results = []
    for turn in range(count):
        if turn % 4 == 3:
            for name in ("data", "model"):
                shutil.rmtree(work / name, ignore_errors=True)
        number, moment = draw.choice(SIGNALS), draw.uniform(0, length)
        if turn % 8 == 0:
            moment = draw.uniform(0, 2)  # the imports
        results.append(attempt(work, f"run{turn}", number, moment))
        r = results[-1]
        came = f"{r['code']} after {r['seconds']:.1f} s"
        print(f"{turn + 1:3} {r['signal']:8} at {r['moment_s']:6.2f} s: {came}  {r['during'][:60]}")
        if not r["good"]:
            print(json.dumps(r, indent=1))
        sys.stdout.flush()
        good, slowest = sum(r["good"] for r in results), max(r["seconds"] for r in results)
        kept = {"count": len(results), "seed": seed, "good": good, "undisturbed_s": round(length, 1)}
        if keep:
            RESULTS.write_text(json.dumps(kept | {"slowest_s": slowest, "signals": results}, indent=1) + "\n")
    print(f"{good} of {count} ended with 75 and one line, and left nothing; the slowest took {slowest:.1f} s")
    return 0 if good == count else 1


def main() -> int:
    """Runs the program in separate namespaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--length", type=float, help="moments up to so many seconds; no undisturbed run, nothing is kept"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return inside(args.count, args.seed, args.length)
    return subprocess.run(isolated(sys.argv[1:]), check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
