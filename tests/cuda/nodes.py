"""What stands on simulated GPU nodes: actors that tell what they were given, and a stand-in for NVML in every process.

python -m tests.cuda.nodes PYTHON -m skyrl_mega.cluster.slurm_node FOLDER …   what a node's task of a Slurm job starts
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
"""This machine's CPUs, as if they were of two sockets."""

PYNVML = """
from tests.cuda.nodes import SOCKETS
from tests.preflight.nvml import Device, Nvml

library = Nvml([Device(cpus=SOCKETS[gpu // 4]) for gpu in range(8)])
globals().update({name: getattr(library, name) for name in dir(library) if not name.startswith("_")})
"""
"""A module `pynvml` of a node with 8 GPUs, four at each socket."""


class Teller:
    """In the place of a policy rank or an engine."""

    def __init__(self, **_: Any) -> None:
        self.environment = dict(os.environ)  # as the constructor finds it: what CUDA reads, it reads here first

    def start(self) -> None:
        """As an engine's."""

    def sleep(self, parts: list[str]) -> None:
        """As an engine's, before models are built."""

    def tell(self) -> tuple[dict[str, str], set[int]]:
        """Its environment and its CPUs."""
        return self.environment, os.sched_getaffinity(0)


def main() -> None:
    """Prints what `skyrl_mega.cluster.slurm_node` makes of Slurm's variables."""
    from skyrl_mega.cluster import slurm_node

    python, *_, folder = sys.argv[1:5]
    job = slurm_node.Job.of(Path(folder), os.environ)
    node = slurm_node.RayNode(job, slurm_node.HEAD if job.rank == 0 else ["--address=10.0.0.1:1"])
    told = {
        "python": python,
        "job": asdict(job) | {"folder": folder},
        "ray": node.command,
        "env": slurm_node._environment(),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
