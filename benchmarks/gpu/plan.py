"""Plan of the next calls, printed without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.catalogue import TE
from benchmarks.gpu.prepare_vllm import SCRIPT, VLLM
from benchmarks.gpu.proof import Proof
from benchmarks.gpu.runner import LEAST_S, ROOT, expected_s
from benchmarks.gpu.wheels import brings, held

CALLS, CALL_S = 2, 400.0
"""Number of calls in a window of 900 s, machine start included, and seconds of each call."""
UNPACKED = "/tmp/vllm-site"
"""Folder of vLLM's packages on the GPU machine."""


def plan(proofs: Sequence[Proof], wheels: Path, calls: int = CALLS, call_s: float = CALL_S) -> list[list[Proof]]:
    """Returns the proofs of each call: in catalogue order, each in the first call with enough time.

    Excluded are proofs with missing packages in the folder and proofs longer than every call.
    """
    possible = [proof for proof in proofs if all(brings(wheels, need) for need in proof.needs)]
    left = [proof for proof in possible if not proof.makes or held(wheels)]
    makers = [proof for proof in left if proof.makes]
    plans: list[list[Proof]] = []
    for _ in range(calls):
        # A later call starts on a fresh machine, without the packages installed before.
        again = [maker for maker in makers if maker not in left and any(maker.makes in p.needs for p in left)]
        seconds, chosen = call_s, []
        for proof in (*again, *left):
            if (needed := max(LEAST_S, expected_s(proof, wheels))) <= seconds:
                chosen.append(proof)
                seconds -= needed
        left = [proof for proof in left if proof not in chosen]
        plans.append(chosen)
    return plans


def described(proofs: Sequence[Proof], wheels: Path, vllm: Path, results: Path, earlier: Path) -> str:
    """Returns the commands of the calls and the proofs of each call.

    Args:
        proofs: Proofs to run.
        wheels: Folder of packages (`--prepare`).
        vllm: Folder of vLLM (`--prepare-vllm`).
        results: Folder of results on the GPU machine.
        earlier: Folder of results on this machine.
    """
    lines: list[str] = []
    where = "" if wheels == ROOT / ".wheels" else f" --wheels {wheels}"
    calls = plan(proofs, wheels)
    for number, chosen in enumerate(filter(None, calls), 1):
        seconds = sum(expected_s(proof, wheels) for proof in chosen)
        lines += [f"call {number}, {seconds:.0f} s expected, carries the repository and {wheels.name}:"]
        lines += [f"  python3 -m benchmarks.gpu --budget {CALL_S:.0f}{where} --results {results}"]
        lines += ["  " + ", ".join(f"{p.name} {expected_s(p, wheels):.0f}" for p in chosen)]
        lines += [f"  then copy {results}/*.json to {earlier}, where the next call finds them"]
    run = {proof.name for chosen in calls for proof in chosen}
    apart = [p for p in proofs if VLLM in p.needs and not brings(wheels, VLLM)]
    if apart and (vllm / SCRIPT).exists():
        lines += _call_of_vllm(apart, wheels, vllm, results)
        run |= {proof.name for proof in apart}
    late, absent = list[str](), dict[str, list[str]]()
    for proof in proofs:
        lacks = next((need for need in _needs(proof, wheels) if not brings(wheels, need)), None)
        if lacks and proof.name not in run:
            absent.setdefault(lacks, []).append(proof.name)
        elif proof.name not in run:
            late.append(proof.name)
    lines += [f"no call has time for: {', '.join(late)}"] if late else []
    lines += [
        f"{wheels.name} does not bring {need}, which these need: {', '.join(names)}" for need, names in absent.items()
    ]
    if set(absent) & {*TE}:
        lines += [f"bring it first, on a machine with a network: python3 -m benchmarks.gpu --prepare {wheels}"]
    if VLLM in absent:
        lines += [f"bring it for a call of its own: python3 -m benchmarks.gpu --prepare-vllm {vllm}"]
    return "\n".join(lines)


def _call_of_vllm(proofs: Sequence[Proof], wheels: Path, vllm: Path, results: Path) -> list[str]:
    """Returns the lines of the call with vLLM: a separate call, because a call cannot carry both folders."""
    seconds = sum(expected_s(proof, wheels) for proof in proofs)
    names = " ".join(proof.name for proof in proofs)
    there = vllm.relative_to(ROOT) if vllm.is_relative_to(ROOT) else vllm
    return [
        f"a call in another window, or in place of one of these, {seconds:.0f} s expected, carries the repository and "
        f"{vllm.name}, without {wheels.name} (one call cannot carry both):",
        f"  bash {there}/{SCRIPT} {UNPACKED} && PYTHONPATH={UNPACKED} python3 -m benchmarks.gpu --only {names} "
        f"--budget {CALL_S:.0f} --results {results}",
    ]


def _needs(proof: Proof, wheels: Path) -> tuple[str, ...]:
    """Returns the packages that the folder must hold for this proof, including packages installed by the proof."""
    return (*proof.needs, *((proof.makes,) if proof.makes and not held(wheels) else ()))
