"""`--prepare FOLDER`, on a machine with a network: fetches the packages missing on a GPU machine, small enough to
carry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.fatbin import shrink_wheel
from benchmarks.gpu.runner import ROOT
from benchmarks.gpu.wheels import CORE, EXTENSION, compile_extension, compiled
from skyrl_mega.common.errors import UserError

PACKAGES = (
    *("megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("nvdlfw-inspect", "transformer-engine", "fla-core"),
)
LOCK = ROOT / "requirements" / "cuda.lock"
TORCH, PYTHON = "2.11.0", "3.12"
"""Versions of the GPU machine; the extension is compiled for these."""
LIMIT_MIB = 64
"""Upper bound of a call's files, the repository included."""
WORK = ROOT / "build" / "gpu_wheels"
"""Work folder: full wheels, an environment with the GPU machine's torch, and object files. A later call reuses them."""
PLATFORMS = (
    *("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64"),
    "manylinux2014_x86_64",
)
MIB = 2**20


def prepare(folder: Path, say: Callable[[str], None]) -> None:
    """Fetches the packages missing in the folder and prints the size of each file.

    Raises:
        UserError: pip cannot fetch a package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    versions = locked()
    wanted = [name for name in PACKAGES if not files_of(folder, name, versions[name])]
    if wanted:
        say(f"downloading {', '.join(wanted)}")
        download(folder, [f"{name}=={versions[name]}" for name in wanted])
    if not files_of(folder, CORE, versions[CORE]):
        _bring_core(folder, versions[CORE], say)
    if not compiled(files_of(folder, EXTENSION, versions[EXTENSION])):
        _bring_extension(folder, versions[EXTENSION], say)
    say_sizes(folder, say)


def locked() -> dict[str, str]:
    """Returns the version of each package in the list for CUDA."""
    return dict(line.split("==") for line in LOCK.read_text().splitlines() if re.match(r"[\w.-]+==[\w.]+$", line))


def files_of(folder: Path, name: str, version: str) -> list[Path]:
    """Returns a folder's files of a package."""
    return sorted(folder.glob(f"{name.replace('-', '_')}-{version}[-.]*"))


def _pip(python: Path | str, *arguments: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(python), "-m", "pip", *arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"--prepare: pip {arguments[0]} failed: {''.join(last)}; run it again to go on from here")


def download(folder: Path, packages: list[str]) -> None:
    """Downloads wheels for the GPU machine, without their dependencies.

    Raises:
        UserError: pip cannot fetch a package.
    """
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:", "--no-deps", *platforms]
    _pip(sys.executable, "download", "--quiet", *target, "-d", str(folder), *packages)


def _bring_core(folder: Path, version: str, say: Callable[[str], None]) -> None:
    """Writes Transformer Engine's core with Hopper's device code only; the wheel's name gets a build tag."""
    if not files_of(WORK, CORE, version):
        say(f"downloading {CORE}")
        download(WORK, [f"{CORE}=={version}"])
    (whole,) = files_of(WORK, CORE, version)
    head = f"{CORE.replace('-', '_')}-{version}-"
    say(f"shrinking {whole.name} ({whole.stat().st_size / MIB:.0f} MiB) to sm_90")
    shrink_wheel(whole, folder / f"{head}1sm90-{whole.name.removeprefix(head)}")
    whole.unlink()


def _bring_extension(folder: Path, version: str, say: Callable[[str], None]) -> None:
    """Compiles the extension for the GPU machine's torch, or copies the source if this machine lacks a compiler."""
    python, missing = _host_python(), [tool for tool in ("g++", "nvcc") if not shutil.which(tool)]
    if python is None:
        missing.append(f"python{PYTHON}")
    environment = WORK / "environment"
    interpreter = environment / "bin" / "python"
    if not (environment / ".ready").exists():
        say(f"an environment with torch {TORCH}, to compile {EXTENSION} in")
        subprocess.run([python or sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        _pip(
            interpreter,
            "install",
            "--quiet",
            f"torch=={TORCH}",
            *("numpy", "setuptools<82", "wheel", "ninja", "pybind11"),
        )
        (environment / ".ready").touch()
    if not files_of(WORK, EXTENSION, version):
        how = ["--no-deps", "--no-binary=:all:", "--no-build-isolation"]
        env = {**os.environ, "NVTE_FRAMEWORK": "pytorch"}
        _pip(interpreter, "download", "--quiet", *how, "-d", str(WORK), f"{EXTENSION}=={version}", env=env)
    (source,) = files_of(WORK, EXTENSION, version)
    if missing:
        say(f"{EXTENSION} comes as source, which te_build compiles on the GPU host: no {', '.join(missing)} here")
        shutil.copy(source, folder)
        return
    tree = WORK / source.name.removesuffix(".tar.gz")
    # Also over an earlier compilation: the build deletes some sources at its end; object files are kept.
    with tarfile.open(source) as archive:
        archive.extractall(WORK, filter="data")
    say(f"compiling {EXTENSION} for torch {TORCH} (20 to 40 minutes on two cores; MAX_JOBS bounds its processes)")
    if complaint := compile_extension(str(interpreter), tree, folder, int(os.environ.get("MAX_JOBS", "2"))):
        raise UserError(f"--prepare: {EXTENSION} does not compile: {complaint.splitlines()[-1]}; run it again to go on")
    for file in folder.glob(source.name):  # left by an earlier call without a compiler
        file.unlink()


def _host_python() -> str | None:
    """Returns an interpreter of the GPU machine's Python version, from the path or from pyenv."""
    candidates = [
        f"python{PYTHON}",
        *map(str, sorted(Path.home().glob(f".pyenv/versions/{PYTHON}*/bin/python{PYTHON}"))),
    ]
    for name in candidates:
        if (path := shutil.which(name)) and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    return None


def say_sizes(folder: Path, say: Callable[[str], None]) -> None:
    """Prints the size of each file, and the total with the repository against the limit of a call."""
    sizes = {f.name: f.stat().st_size for f in sorted(folder.iterdir()) if f.is_file()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    sizes["the repository"] = sum((ROOT / name).lstat().st_size for name in listed if name and (ROOT / name).exists())
    for name, size in sizes.items():
        say(f"{size / MIB:7.1f} MiB  {name}")
    total = sum(sizes.values()) / MIB
    say(f"{total:7.1f} MiB  in all, of {LIMIT_MIB} that a call can carry" + (": TOO MUCH" if total > LIMIT_MIB else ""))
