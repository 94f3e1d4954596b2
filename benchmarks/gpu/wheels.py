"""Packages prepared as files, for a machine without a network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from skyrl_mega.common.errors import UserError

HELD = "transformer_engine"
"""Prefix of the packages left to proof `te_build` (benchmarks/gpu/te.py): megatron-core cannot be imported beside a
partly installed Transformer Engine or an extension compiled for another torch."""

CORE, EXTENSION = "transformer-engine-cu13", "transformer-engine-torch"
"""Transformer Engine's kernels, and the extension loaded by torch. The extension may come as source; compiling takes
minutes."""


def install(folder: Path) -> Path | None:
    """Installs the packages of `folder`, except held packages, and returns the installation folder, a temporary folder.

    The folder is reused for the same files, Python and torch. None if there is nothing to install.

    Raises:
        UserError: pip refuses a file.
    """
    files = _files(folder)
    if not files:
        return None
    identity = "".join(f"{f.name} {f.stat().st_size} " for f in files) + sys.version + _torch()
    site = Path(tempfile.gettempdir()) / f"skyrl-mega-gpu-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    site.mkdir(exist_ok=True)
    if not (site / ".whole").exists():
        at_once = [f for f in files if f not in held(folder)]
        if at_once and (complaint := into(site, at_once)):
            raise UserError(
                f"--wheels {folder}: {complaint.splitlines()[-1]}; give wheels for Python {sys.version_info.major}."
                f"{sys.version_info.minor} on this machine"
            )
        (site / ".whole").touch()
    return site


def held(folder: Path) -> list[Path]:
    """Returns the files in `folder` skipped by `install`."""
    return [f for f in _files(folder) if f.name.startswith(HELD)]


def into(site: Path, files: list[Path]) -> str:
    """Installs files into a folder and returns pip's error; empty on success."""
    command = [*(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"), "--no-compile"]
    command += ["--no-build-isolation", "--no-cache-dir", "--upgrade", "--target", str(site), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return (done.stderr.strip() or f"pip ended with {done.returncode}") if done.returncode else ""


def brings(folder: Path, module: str) -> list[Path]:
    """Returns the files in a folder that provide a module or a package, wheels and source."""
    begin = module.replace(".", "_").replace("-", "_")
    return [f for f in _files(folder) if f.name.startswith(f"{begin}-")]


def compiled(files: list[Path]) -> bool:
    """Returns True if a wheel is among these files."""
    return any(f.suffix == ".whl" for f in files)


def compile_extension(python: str, source: Path, target: Path, jobs: int) -> str:
    """Compiles Transformer Engine's extension for an interpreter's torch into a wheel in `target`.

    In a source folder, object files of an earlier compilation are reused.

    Returns:
        pip's error; empty on success.
    """
    ask = "import importlib.util as i; s = i.find_spec('nvidia'); print(*(s.submodule_search_locations if s else ()))"
    roots = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    libraries = [folder for root in roots for folder in sorted(Path(root).iterdir()) if folder.is_dir()]
    env = {**os.environ, "NVTE_FRAMEWORK": "pytorch", "NVTE_WITH_NCCL_EP": "0", "MAX_JOBS": str(jobs)}
    env["NVTE_PYTORCH_FORCE_BUILD"] = "TRUE"  # else it first looks for a wheel in the network
    # Else the version ends with the commit of a repository around the source, and Transformer Engine refuses it.
    env["NVTE_NO_LOCAL_VERSION"] = "1"
    # Headers must belong to the libraries loaded by torch, not to the system's.
    headers = [str(folder / "include") for folder in libraries]
    env["CPATH"] = os.pathsep.join([*headers, *filter(None, [os.environ.get("CPATH")])])
    if cudnn := next((str(folder) for folder in libraries if folder.name == "cudnn"), ""):
        env.setdefault("CUDNN_PATH", cudnn)
    if toolkit := _toolkit():
        env.setdefault("CUDA_HOME", toolkit)
    command = [python, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    command.append("--no-cache-dir")  # a cached wheel may be for another torch
    done = subprocess.run([*command, "-w", str(target), str(source)], env=env, capture_output=True, text=True)
    return (done.stderr.strip() or f"pip ended with {done.returncode}") if done.returncode else ""


def _toolkit() -> str:
    """Returns the CUDA toolkit's folder as printed by nvcc: the nvcc on the path may be a wrapper script."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return ""
    output = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return str(Path(top[1].strip()).resolve()) if top else ""


def nvidia() -> list[Path]:
    """Returns the folders of CUDA libraries and headers installed with torch; empty if torch uses the system's."""
    package = importlib.util.find_spec("nvidia")
    roots = [Path(path) for path in (package and package.submodule_search_locations) or ()]
    return sorted(folder for root in roots for folder in root.iterdir() if folder.is_dir())


def _files(folder: Path) -> list[Path]:
    return sorted((*folder.glob("*.whl"), *folder.glob("*.tar.gz")))


def _torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
