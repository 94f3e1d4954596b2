"""`python -m benchmarks.gpu`: runs every proof without a verdict within a time budget (README.md)."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.plan import described
from benchmarks.gpu.prepare import prepare
from benchmarks.gpu.prepare_vllm import prepare_vllm
from benchmarks.gpu.proof import Proof
from benchmarks.gpu.results import WAITING, Results, files, read, table
from benchmarks.gpu.runner import ROOT, Call, expected_s, run, there
from benchmarks.gpu.wheels import brings, install
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import Parser
from skyrl_mega.preflight.gpus import gather

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "vllm", "numpy", "transformers")
KEPT = ROOT / "benchmarks" / "results" / "gpu"
REHEARSED = ROOT / "runs" / "gpu_rehearsal"


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every chosen proof passed, 1 if a proof failed or is still to run, 2 for a mistake of the user."""
    try:
        return _main(_parser().parse_args(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where results are kept, a file a device (benchmarks/results/gpu)",
    )
    add(
        "--earlier",
        type=Path,
        nargs="+",
        default=[KEPT],
        metavar="PATH",
        help="files and folders of results to go on from, besides (benchmarks/results/gpu)",
    )
    add("--budget", type=float, default=560, metavar="SECONDS", help="of this call (560)")
    add("--only", nargs="+", default=[], metavar="PROOF", help="these alone")
    add(
        "--stage",
        type=int,
        nargs="+",
        choices=(1, 2, 3),
        default=[1, 2, 3],
        help="1 torch, 2 Transformer Engine, 3 vLLM",
    )
    add("--again", action="store_true", help="those too that have a verdict")
    add("--list", action="store_true", help="names the proofs and what is known of them, and runs none")
    add("--wheels", type=Path, metavar="FOLDER", help="packages to install first (.wheels; none for --rehearse)")
    add("--prepare", type=Path, metavar="FOLDER", help="brings these packages, on a machine with a network; runs none")
    add("--prepare-vllm", type=Path, metavar="FOLDER", help="brings vLLM for a call of its own, likewise; runs none")
    add("--plan", action="store_true", help="says what the calls of a window will run, and runs none")
    add("--rehearse", action="store_true", help="on the CPU, with tiny sizes: proves the script, not the GPU")
    return parser


def _main(options: argparse.Namespace) -> int:
    known = {proof.name: proof for proof in PROOFS}
    for name in options.only:
        if name not in known:
            raise UserError(f"--only {name}: no such proof; there are {', '.join(known)}")
    if not 0 < options.budget < float("inf"):
        raise UserError(f"--budget {options.budget:g}: allowed are seconds above 0")
    if options.wheels is not None and not options.wheels.is_dir():
        raise UserError(f"--wheels {options.wheels}: no such folder; give the one that the packages were brought in")
    wheels = options.prepare or options.wheels or ROOT / ".wheels"
    chosen = [p for p in PROOFS if p.stage in options.stage and (not options.only or p.name in options.only)]
    folder = options.results or (REHEARSED if options.rehearse else KEPT)
    if folder.is_file():
        raise UserError(f"--results {folder}: a file; give a folder, which gets a file for each device")
    for path in options.earlier:
        if path != KEPT and not path.exists():
            raise UserError(f"--earlier {path}: no such file or folder; give results of an earlier call")
    if options.prepare:
        prepare(options.prepare, _say)
    if options.prepare_vllm:
        prepare_vllm(options.prepare_vllm, _say)
    if options.prepare or options.prepare_vllm or options.plan:
        vllm = options.prepare_vllm or ROOT / ".vllm"
        print(described(chosen, wheels, vllm, options.results or Path("OUT"), KEPT.relative_to(ROOT)))
        return 0
    if not options.list and not options.rehearse:
        _refuse_without_a_gpu()
    # Prepared packages are for the GPU machine's Python and torch. A rehearsal may run with other versions.
    brought = wheels if options.wheels or not options.rehearse else None
    site = install(brought) if brought and not options.list else None
    if site is not None:
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
    if options.list:
        print(_listed(chosen, [folder, *options.earlier], wheels))
        return 0
    device = {"name": "a rehearsal on the CPU"} if options.rehearse else _device()
    versions = {"python": sys.version.split()[0], **{name: _version(name, brought) for name in PACKAGES}}
    results = Results(folder, device, versions, options.earlier)
    call = Call(options.budget, options.rehearse, options.again, _commit(), site, brought, _say)
    whole = run(chosen, results, call)
    print(f"\n{device['name']}; results in {results.path}\n\n{table(chosen, results)}")
    return 0 if whole else 1


def _say(line: str) -> None:
    print(line, flush=True)


def _refuse_without_a_gpu() -> None:
    if not there("torch"):
        raise UserError(f"torch cannot be imported by {sys.executable}; give PYTHON=… with a build of torch for CUDA")
    # Runs in a separate process: proof 1 checks which processes touched the GPU.
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", ask], capture_output=True, timeout=120).returncode:
        raise UserError("torch sees no CUDA device here; --rehearse goes through the proofs on the CPU")


def _device() -> dict[str, Any]:
    facts = gather()
    if facts.gpus:
        gpu = facts.gpus[0]
        return {"name": gpu.name, "memory_gib": round(gpu.memory_bytes / 2**30, 2), "driver": facts.driver}
    ask = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, sep='|')"
    result = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120).stdout.strip()
    name, _, size = result.partition("|")
    return {"name": name, "memory_gib": round(int(size or 0) / 2**30, 2), "driver": None, "nvml": facts.error}


def _version(package: str, wheels: Path | None) -> str | None:
    """Returns a package's version, installed or in the folder of wheels; None without the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        files = brings(wheels, package) if wheels else []
        return files[0].name.split("-")[1] if files else None


def _commit() -> str | None:
    """Returns the repository's commit; None in a copy without the git history."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None


def _listed(proofs: list[Proof], paths: list[Path], wheels: Path) -> str:
    """Returns a line for each proof, with the status on each device of the results."""
    known = [read(file) for file in dict.fromkeys(file for path in paths for file in files(path))]
    wide = max(len(p.name) for p in proofs)
    lines = []
    for p in proofs:
        statuses = {k["device"]["name"]: k["proofs"][p.name]["status"] for k in known if p.name in k["proofs"]}
        status = ", ".join(f"{status} ({device})" for device, status in statuses.items()) or WAITING
        seconds = f"{expected_s(p, wheels):4.0f} s, at most {p.limit_s:4.0f}"
        lines.append(f"{p.name.ljust(wide)}  stage {p.stage}  {seconds}  {status:10}  {p.about}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
