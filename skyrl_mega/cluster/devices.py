"""The choice between CPU and GPU: evidence of GPUs on a machine, and torch's ability to use GPUs.

torch alone does not decide. A torch built without CUDA, or under too old a driver, sees no GPU on a machine full of
GPUs, and a GPU run would silently start on the CPUs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_mega.cluster.nvml import NvmlUnavailable, open_nvml
from skyrl_mega.common.errors import UserError

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> oldest suitable driver branch (docs.nvidia.com/deploy/cuda-compatibility)."""
ALLOWED = "; to compute on the CPU give cluster.device=cpu"
REMEDY = "run it with the environment of `make cuda` or the image of docker/Dockerfile"


@dataclass(frozen=True)
class TorchView:
    """torch's view of this machine's GPUs."""

    version: str
    """torch's version."""
    cuda: str | None
    """CUDA version of the torch build; None for a build without CUDA."""
    sees: bool
    """True if torch can use a GPU."""
    reason: str = ""
    """torch's warning when no GPU is usable; may be empty."""


@dataclass(frozen=True)
class GpuEvidence:
    """Evidence of GPUs on this machine other than torch."""

    nvml: int = 0
    """Number of GPUs according to NVML."""
    driver: str | None = None
    """Version of the NVIDIA driver; None if unknown."""
    slurm: int = 0
    """Number of GPUs on this node assigned to the job by Slurm."""

    def __bool__(self) -> bool:
        return bool(self.nvml or self.slurm)

    def __str__(self) -> str:
        by = [f"{self.nvml} GPUs by NVML (driver {self.driver})"] if self.nvml else []
        by += [f"{self.slurm} GPUs by SLURM_GPUS_ON_NODE"] if self.slurm else []
        return ", ".join(by) or "no GPU"


def torch_view() -> TorchView:
    """Returns torch's view of this machine's GPUs without starting a CUDA context."""
    import torch

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sees = torch.cuda.is_available()
    said = str(warned[0].message).strip().splitlines()[0] if warned else ""
    return TorchView(torch.__version__, torch.version.cuda, sees, said)


def gpu_evidence(env: Mapping[str, str] = os.environ, nvml: Any = None) -> GpuEvidence:
    """Returns the evidence of GPUs on this machine from NVML and Slurm's variables; without NVML, from Slurm's alone.

    Args:
        env: The process's environment.
        nvml: The module `pynvml` or a substitute for tests; None imports the module.
    """
    slurm_gpus = env.get("SLURM_GPUS_ON_NODE", "")
    slurm = int(slurm_gpus) if slurm_gpus.isdigit() else 0
    try:
        with open_nvml(nvml) as library:
            return GpuEvidence(library.nvmlDeviceGetCount(), str(library.nvmlSystemGetDriverVersion()), slurm)
    except NvmlUnavailable:
        return GpuEvidence(slurm=slurm)


def least_driver(cuda: str | None) -> int | None:
    """Returns the number of the oldest NVIDIA driver branch for a CUDA version, such as 580 for "13.0"; None for None
    or an unknown version."""
    return LEAST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None


def outdated(cuda: str | None, driver: str | None) -> bool:
    """Returns True if the driver version is too old for the CUDA version; False if either is unknown (None)."""
    minimum, branch = least_driver(cuda), (driver or "").partition(".")[0]
    return minimum is not None and branch.isdigit() and int(branch) < minimum


def why_no_gpu(torch: TorchView, driver: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Returns a phrase with the likely reason why torch sees none of this machine's GPUs, for an error message.

    Args:
        torch: torch's view of the GPUs.
        driver: Version of the NVIDIA driver; None if unknown.
        env: The process's environment.
    """
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA; {REMEDY}"
    if outdated(torch.cuda, driver):
        minimum = least_driver(torch.cuda)
        return (
            f"torch {torch.version} is built for CUDA {torch.cuda}, which needs driver {minimum}; this one is {driver}"
        )
    if env.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty and hides them; unset it"
    return f"torch {torch.version} (CUDA {torch.cuda}) sees none of them{f': {torch.reason}' if torch.reason else ''}"


def choose_device(
    wanted: str, cluster_gpus: Callable[[], float], *, torch: TorchView, here: GpuEvidence, joined: bool
) -> str:
    """Returns the device type of the run, `cpu` or `cuda`.

    If the run joins a Ray cluster, the driver may be on a node without a GPU, or with only a display GPU. With `auto`,
    the GPUs of the cluster decide then. With `cuda` nothing is checked here; every actor later refuses to compute on
    anything else.

    Args:
        wanted: Value of `cluster.device`.
        cluster_gpus: Returns the number of GPUs of the joined Ray cluster; called only if `wanted` is `auto` and
            `joined`. Its errors pass through.
        torch, here: See `torch_view` and `gpu_evidence`.
        joined: True if the run joins a Ray cluster.

    Raises:
        UserError: torch cannot use the existing GPUs; `cuda` is set and there are none; or, with `auto`, this machine
            has GPUs and the joined cluster has none.
    """
    if wanted == "cpu":
        return "cpu"
    if joined:
        return "cuda" if wanted == "cuda" else _choose_for_cluster(cluster_gpus(), torch, here)
    if torch.sees:
        return "cuda"
    if here:
        raise UserError(
            f"here are {here}, but {why_no_gpu(torch, here.driver)}{ALLOWED}", key="cluster.device", value=wanted
        )
    if wanted == "cuda":
        raise UserError("torch sees no CUDA device here; allowed is cpu or auto", key="cluster.device", value="cuda")
    return "cpu"


def _choose_for_cluster(gpus: float, torch: TorchView, here: GpuEvidence) -> str:
    """Resolves `auto` for a joined Ray cluster."""
    if not gpus and here:
        raise UserError(
            f"here are {here}, but the Ray cluster has none; start Ray with its nodes' GPUs (ray "
            f"start --num-gpus=8){ALLOWED}",
            key="cluster.device",
            value="auto",
        )
    if gpus and torch.cuda is None:
        raise UserError(
            f"the Ray cluster has {gpus:g} GPUs, but {why_no_gpu(torch, None)}; where only this "
            f"process has no CUDA, give cluster.device=cuda{ALLOWED}",
            key="cluster.device",
            value="auto",
        )
    return "cuda" if gpus else "cpu"
