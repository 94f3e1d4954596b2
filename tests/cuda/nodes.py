"""Processes on simulated GPU nodes: actors that report environment and CPUs, and a simulated NVML in every process.

A node's Slurm task starts `python -m tests.cuda.nodes PYTHON -m skyrl_mega.cluster.slurm_node FOLDER …`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CPUS = sorted(os.sched_getaffinity(0))
SOCKETS = (CPUS[: -(-len(CPUS) // 2)], CPUS[-(-len(CPUS) // 2) :] or CPUS)
"""This machine's CPUs, split into two sockets."""

PYNVML = """
from tests.cuda.nodes import SOCKETS
from tests.preflight.nvml import Device, Nvml

library = Nvml([Device(cpus=SOCKETS[gpu // 4]) for gpu in range(8)])
globals().update({name: getattr(library, name) for name in dir(library) if not name.startswith("_")})
"""
"""Source of a module `pynvml` for a node with 8 GPUs, four at each socket."""


class Teller:
    """Actor in the place of a policy rank or an engine; reports environment and CPUs."""

    def __init__(self, **_: Any) -> None:
        self.environment = dict(os.environ)  # copied first, before CUDA could read the environment

    def start(self) -> None:
        """Does nothing, like an engine's `start`."""

    def sleep(self, parts: list[str]) -> None:
        """Does nothing, like an engine's `sleep` before models are built."""

    def tell(self) -> tuple[dict[str, str], set[int]]:
        """Returns the actor's environment and CPUs."""
        return self.environment, os.sched_getaffinity(0)


def main() -> None:
    """Prints the settings that `skyrl_mega.cluster.slurm_node` derives from Slurm's variables."""
    from skyrl_mega.cluster import slurm_node

    python, *_, folder = sys.argv[1:5]
    job = slurm_node.Allocation.of(Path(folder), os.environ)
    node = slurm_node.RayNode(job, slurm_node.HEAD if job.rank == 0 else ["--address=10.0.0.1:1"])
    settings = {
        "python": python,
        "job": asdict(job) | {"folder": folder},
        "ray": node.command,
        "env": slurm_node._environment(),
    }
    print(json.dumps(settings), flush=True)


if __name__ == "__main__":
    main()
