"""Whether a run computes on GPUs: what tells of them, and whether torch can use them.

torch alone does not decide. One without CUDA, or under a driver that is too old for it, sees no GPU on a machine that
is full of them, and a run for GPUs would start on its CPUs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_mega.cluster.nvml import NoNvml, opened
from skyrl_mega.config.errors import UserError

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version → the first branch of drivers that runs it (docs.nvidia.com/deploy/cuda-compatibility)."""
ALLOWED = "; to compute on the CPU give cluster.device=cpu"
REMEDY = "run it with the environment of `make cuda` or the image of docker/Dockerfile"


@dataclass(frozen=True)
class Sight:
    """What torch says of this machine's GPUs."""

    version: str
    """torch's."""
    cuda: str | None
    """The CUDA that it is built for; None is a build without."""
    sees: bool
    """It can use one."""
    said: str = ""
    """Its own reason where it cannot and has one."""


@dataclass(frozen=True)
class Signs:
    """What else tells of GPUs of this machine."""

    nvml: int = 0
    """GPUs that NVML counts."""
    driver: str | None = None
    slurm: int = 0
    """GPUs that Slurm has given to the job here."""

    def __bool__(self) -> bool:
        return bool(self.nvml or self.slurm)

    def __str__(self) -> str:
        by = [f"{self.nvml} GPUs by NVML (driver {self.driver})"] if self.nvml else []
        by += [f"{self.slurm} GPUs by SLURM_GPUS_ON_NODE"] if self.slurm else []
        return ", ".join(by) or "no GPU"


def sight() -> Sight:
    """Asks torch; starts no CUDA context."""
    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sees = torch.cuda.is_available()
    said = str(told[0].message).strip().splitlines()[0] if told else ""
    return Sight(torch.__version__, torch.version.cuda, sees, said)


def signs(env: Mapping[str, str] = os.environ, nvml: Any = None) -> Signs:
    """Asks NVML and Slurm's variables."""
    given = env.get("SLURM_GPUS_ON_NODE", "")
    slurm = int(given) if given.isdigit() else 0
    try:
        with opened(nvml) as library:
            return Signs(library.nvmlDeviceGetCount(), str(library.nvmlSystemGetDriverVersion()), slurm)
    except NoNvml:
        return Signs(slurm=slurm)


def least_driver(cuda: str | None) -> int | None:
    """The first branch of drivers that runs this CUDA; None where that is not known."""
    return LEAST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None


def outdated(cuda: str | None, driver: str | None) -> bool:
    """Whether a driver comes before the first that runs this CUDA."""
    least, branch = least_driver(cuda), (driver or "").partition(".")[0]
    return least is not None and branch.isdigit() and int(branch) < least


def blindness(torch: Sight, driver: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Why torch sees none of the GPUs that are there."""
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA; {REMEDY}"
    if outdated(torch.cuda, driver):
        least = least_driver(torch.cuda)
        return f"torch {torch.version} is built for CUDA {torch.cuda}, which needs driver {least}; this one is {driver}"
    if env.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty and hides them; unset it"
    return f"torch {torch.version} (CUDA {torch.cuda}) sees none of them{f': {torch.said}' if torch.said else ''}"


def choose(wanted: str, cluster_gpus: Callable[[], float], *, torch: Sight, here: Signs, joined: bool) -> str:
    """`cpu` or `cuda`.

    The driver of a Ray cluster that is joined may stand on a node without a GPU, or with one that only drives a
    display. So the cluster's GPUs decide there, and not the driver's; `cuda` is taken at its word, and every actor
    refuses to compute on anything else.

    Args:
        wanted: `cluster.device`.
        cluster_gpus: Asks a Ray cluster that is joined how many GPUs it has.
        torch, here: See `sight` and `signs`.
        joined: There is such a cluster.

    Raises:
        UserError: There are GPUs that torch cannot use; or `cuda` is wanted and there are none.
    """
    if wanted == "cpu":
        return "cpu"
    if joined:
        return "cuda" if wanted == "cuda" else _of_the_cluster(cluster_gpus(), torch, here)
    if torch.sees:
        return "cuda"
    if here:
        raise UserError(f"cluster.device = {wanted}: here are {here}, but {blindness(torch, here.driver)}{ALLOWED}")
    if wanted == "cuda":
        raise UserError("cluster.device = cuda: torch sees no CUDA device here; allowed is cpu or auto")
    return "cpu"


def _of_the_cluster(gpus: float, torch: Sight, here: Signs) -> str:
    """What `auto` means with a cluster that is joined."""
    if not gpus and here:
        raise UserError(
            f"cluster.device = auto: here are {here}, but the Ray cluster has none; start Ray with its nodes' GPUs "
            f"(ray start --num-gpus=8){ALLOWED}"
        )
    if gpus and torch.cuda is None:
        raise UserError(
            f"cluster.device = auto: the Ray cluster has {gpus:g} GPUs, but {blindness(torch, None)}; where only "
            f"this process has no CUDA, give cluster.device=cuda{ALLOWED}"
        )
    return "cuda" if gpus else "cpu"
