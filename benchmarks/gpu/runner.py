"""Runs proofs in sequence, each in a separate process group that is killed at the time limit."""

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
"""Environment variables of a proof: the folder of prepared packages, and the folder of the installation."""
LOOK_S = 0.1
LOG_TAIL = 12000
"""Characters kept of a proof's output if it did not pass."""
LEAST_S = 10.0
"""Least time left in a call to start a proof."""


@dataclass
class Call:
    """Settings of one call of the script."""

    budget_s: float
    """Seconds of the whole call."""
    tiny: bool = False
    again: bool = False
    """True if proofs with a verdict run again."""
    commit: str | None = None
    site: Path | None = None
    """Folder of extra modules for the interpreter."""
    wheels: Path | None = None
    """Folder of the prepared packages installed in `site`."""
    say: Callable[[str], None] = print
    start: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds left in the call."""
        return self.start + self.budget_s - time.monotonic()


def run(proofs: Sequence[Proof], results: Results, call: Call) -> bool:
    """Runs the proofs without a verdict that fit into the time left, in order.

    Returns:
        True if every proof has passed, except proofs of stages 2 and 3 with absent packages.
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
            if results.status(proof) in VERDICTS:  # keeps its earlier verdict from counting: the proof must run again
                results.put(proof, {"status": WAITING})
            continue
        _prove(proof, results, call)
    good = (PASSED, CUDA_ONLY) if call.tiny else (PASSED,)
    return all(
        results.status(proof) in good or (proof.stage > 1 and results.status(proof) == NOT_HERE) for proof in proofs
    )


def expected_s(proof: Proof, wheels: Path | None) -> float:
    """Returns the expected seconds of a proof with the prepared packages."""
    as_source = proof.compiles and wheels and not compiled(brings(wheels, proof.compiles))
    return proof.seconds + (proof.compile_s if as_source and not there(proof.compiles) else 0.0)


def _absent(proof: Proof, call: Call) -> list[str]:
    """Returns the modules that the proof needs and that are neither importable nor installable by the proof.

    A rehearsal needs no Transformer Engine: on a CPU these proofs run as far as possible with the local layers.
    """
    needs = [name for name in proof.needs if not (call.tiny and name in (HELD, EXTENSION))]
    return [
        *(name for name in needs if not there(name)),
        *([proof.makes] if proof.makes and not there(proof.makes) and not _brought(call) else []),
    ]


def _gone(proof: Proof, proofs: Sequence[Proof], results: Results, call: Call) -> bool:
    """Returns True if a module installed by a passed proof is gone, can be installed again, and is still needed."""
    if not proof.makes or results.status(proof) != PASSED or there(proof.makes) or not _brought(call):
        return False
    return any(proof.makes in other.needs and results.status(other) not in VERDICTS for other in proofs)


def _brought(call: Call) -> bool:
    return call.wheels is not None and bool(held(call.wheels))


def there(module: str) -> bool:
    """Returns True if a module could be imported, without an import. A name with dashes is looked up among installed
    packages.

    Transformer Engine's compiled module can be found only after the import of the Python package.
    """
    importlib.invalidate_caches()  # a proof may have installed the module
    if "-" in module:
        installed = {
            str(distribution.name).lower().replace("_", "-") for distribution in importlib.metadata.distributions()
        }
        return module in installed
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is absent
        return False


def _prove(proof: Proof, results: Results, call: Call) -> None:
    """Runs one proof and stores the result after each event."""
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
    """Starts a proof's process in a new process group."""
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
    """Returns a proof's environment: the repository and the prepared packages are importable."""
    before = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    brought = {WHEELS: str(call.wheels), SITE: str(call.site)} if call.site and call.wheels else {}
    if cudnn := next((str(folder) for folder in nvidia() if folder.name == "cudnn"), ""):
        brought["CUDNN_PATH"] = os.environ.get("CUDNN_PATH", cudnn)  # else the system's cuDNN is loaded
    if call.tiny:
        brought["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT), *([str(call.site)] if call.site else []), *before]
    return {**os.environ, **brought, "PYTHONPATH": os.pathsep.join(paths)}


def _take(
    events: Path, read: int, result: dict[str, Any], end: dict[str, Any] | None
) -> tuple[int, dict[str, Any] | None]:
    """Adds the complete lines after byte `read` of the events file to the result."""
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
    """Kills the proof's process group, including processes left behind by the proof."""
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
