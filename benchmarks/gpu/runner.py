"""Runs proofs one after the other, each in a process group of its own that ends with its time limit."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.gpu.proof import Proof
from benchmarks.gpu.results import (
    CUDA_ONLY,
    CUT,
    FAILED,
    NOT_HERE,
    PASSED,
    RUNNING,
    TIMEOUT,
    VERDICTS,
    WAITING,
    Results,
)
from benchmarks.gpu.wheels import EXTENSION, HELD, brings, compiled, held, nvidia

ROOT = Path(__file__).parents[2]
WHEELS, SITE = "PROOF_WHEELS", "PROOF_SITE"
"""Environment variables of a proof: the folder of packages that were brought, and where they are installed."""
LOOK_S = 0.1
LOG_TAIL = 3000
"""Characters of a proof's output that are kept where it did not pass."""
LEAST_S = 10.0
"""A call that has no more than this left starts nothing."""


@dataclass
class Call:
    """One call of the script."""

    budget_s: float
    """Seconds after which nothing runs any more."""
    tiny: bool = False
    again: bool = False
    """Proofs that have a verdict run once more."""
    commit: str | None = None
    site: Path | None = None
    """A folder of modules beside the interpreter's own."""
    wheels: Path | None = None
    """Where they came from."""
    say: Callable[[str], None] = print
    start: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.start + self.budget_s - time.monotonic()


def run(proofs: Sequence[Proof], results: Results, call: Call) -> bool:
    """Runs what has no verdict yet and fits into the time left, in order.

    Returns:
        Whether every proof has passed, those of stages 2 and 3 apart whose packages are absent.
    """
    for proof in proofs:
        if results.status(proof) in VERDICTS and not call.again and not _gone(proof, proofs, results, call):
            continue
        if absent := _absent(proof, call):
            why = f"{', '.join(absent)} cannot be imported here"
            results.put(proof, {"status": NOT_HERE if proof.stage > 1 else FAILED, "why": why})
            continue
        expected = LEAST_S if call.tiny else max(LEAST_S, expected_s(proof, call.wheels))
        if call.left_s < expected:
            call.say(f"{proof.name}: needs {expected:.0f} s, {max(0.0, call.left_s):.0f} s are left: not now")
            if results.status(proof) in VERDICTS:  # it has one, and is needed again
                results.put(proof, {"status": WAITING})
            continue
        _prove(proof, results, call)
    good = (PASSED, CUDA_ONLY) if call.tiny else (PASSED,)
    return all(
        results.status(proof) in good or (proof.stage > 1 and results.status(proof) == NOT_HERE) for proof in proofs
    )


def expected_s(proof: Proof, wheels: Path | None) -> float:
    """Returns the seconds that a proof should take with the packages that were brought."""
    as_source = proof.compiles and wheels and not compiled(brings(wheels, proof.compiles))
    return proof.seconds + (proof.compile_s if as_source and not there(proof.compiles) else 0.0)


def _absent(proof: Proof, call: Call) -> list[str]:
    """Returns what the proof needs and is not here, nor among the files that it would install itself.

    A rehearsal needs no Transformer Engine: on a CPU its proofs do what they can with the local layers.
    """
    needs = [name for name in proof.needs if not (call.tiny and name in (HELD, EXTENSION))]
    return [
        *(name for name in needs if not there(name)),
        *([proof.makes] if proof.makes and not there(proof.makes) and not _brought(call) else []),
    ]


def _gone(proof: Proof, proofs: Sequence[Proof], results: Results, call: Call) -> bool:
    """Whether what the proof installed when it passed is not there any more, can be again, and is still needed."""
    if not proof.makes or results.status(proof) != PASSED or there(proof.makes) or not _brought(call):
        return False
    return any(proof.makes in other.needs and results.status(other) not in VERDICTS for other in proofs)


def _brought(call: Call) -> bool:
    return call.wheels is not None and bool(held(call.wheels))


def there(module: str) -> bool:
    """Whether a module could be imported, without importing it; of a name with dashes, whether it is installed.

    Transformer Engine's compiled module is found only once its Python is imported.
    """
    importlib.invalidate_caches()  # a proof may have installed it
    if "-" in module:
        installed = {str(d.name).lower().replace("_", "-") for d in importlib.metadata.distributions()}
        return module in installed
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


def _prove(proof: Proof, results: Results, call: Call) -> None:
    """Runs one proof; its result is on disk after each of its events."""
    limit_s = min(proof.limit_s, call.left_s)
    began = time.monotonic()
    result: dict[str, Any] = {
        "status": RUNNING,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": call.commit,
        "figures": [],
    }
    results.put(proof, result)
    call.say(f"{proof.name}: {proof.about} (at most {limit_s:.0f} s)")
    with tempfile.TemporaryDirectory(prefix=f"proof-{proof.name}-") as scratch:
        folder = Path(scratch)
        events, log = folder / "events", folder / "log"
        with log.open("wb") as output:
            size = "tiny" if call.tiny else "full"
            child = start([proof.entry, str(events), scratch, size], environment(call), output)
        read, end = 0, None
        try:
            while True:
                ended = child.poll() is not None
                read, end = _take(events, read, result, end)
                result["seconds"] = round(time.monotonic() - began, 2)
                results.put(proof, result)
                if ended or time.monotonic() - began > limit_s:
                    break
                time.sleep(LOOK_S)
        finally:
            _end(child)
        result |= _verdict(proof, result, end, ended, child.returncode, limit_s)
        if result["status"] not in (PASSED, CUDA_ONLY):
            result["log"] = log.read_text(errors="replace")[-LOG_TAIL:]
    results.put(proof, result)
    call.say(f"{proof.name}: {result['status']}, {result['seconds']:.0f} s")


def start(arguments: list[str], env: dict[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Starts the process of a proof, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.child", *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def environment(call: Call) -> dict[str, str]:
    """A proof's environment: the repository and what was brought can be imported."""
    before = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    brought = {WHEELS: str(call.wheels), SITE: str(call.site)} if call.site and call.wheels else {}
    if cudnn := next((str(folder) for folder in nvidia() if folder.name == "cudnn"), ""):
        brought["CUDNN_PATH"] = os.environ.get("CUDNN_PATH", cudnn)  # Transformer Engine else loads the machine's own
    if call.tiny:
        brought["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT), *([str(call.site)] if call.site else []), *before]
    return {**os.environ, **brought, "PYTHONPATH": os.pathsep.join(paths)}


def _take(
    events: Path, read: int, result: dict[str, Any], end: dict[str, Any] | None
) -> tuple[int, dict[str, Any] | None]:
    """Adds the whole lines that are new since byte `read` to the result."""
    if not events.exists():
        return read, end
    with events.open("rb") as file:
        file.seek(read)
        new = file.read()
    whole = new[: new.rfind(b"\n") + 1]
    for line in whole.decode().splitlines():
        event = json.loads(line)
        if "end" in event:
            end = event
            continue
        ((kind, value),) = event.items()
        if kind == "figure":
            result["figures"].append(value)
        elif kind == "note":
            result.setdefault("notes", {})[value["name"]] = value["value"]
        else:
            result.setdefault(kind, []).append(value)
    return read + len(whole), end


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the proof's process group: what it started and left, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _verdict(
    proof: Proof, result: dict[str, Any], end: dict[str, Any] | None, ended: bool, code: int, limit_s: float
) -> dict[str, Any]:
    if not ended and end is None:
        if limit_s < proof.limit_s:
            return {"status": CUT, "why": f"{limit_s:.0f} s were left of this call; the next one starts it again"}
        return {"status": TIMEOUT, "why": f"took more than its {limit_s:.0f} s"}
    if end is None:
        return {"status": FAILED, "why": f"its process ended with code {code} and said nothing"}
    if end["end"] != "done":
        why = end["traceback"].strip().splitlines()[-1]
        return {"status": FAILED, "why": why, "traceback": end["traceback"]}
    if result.get("wrong"):
        return {"status": FAILED}
    if not result["figures"] and not result.get("held") and result.get("left out"):
        return {"status": CUDA_ONLY}
    return {"status": PASSED}
