"""The choice between GPUs and the CPU: signs of GPUs on a machine, and torch's answer."""

from __future__ import annotations

import pytest

from skyrl_mega.cluster import devices
from skyrl_mega.cluster.devices import GpuEvidence, TorchView, choose_device
from skyrl_mega.common.errors import UserError
from tests.preflight.nvml import Device, Nvml, NVMLError_LibraryNotFound

SEES = TorchView("2.13.0", "13.0", True)
BLIND = TorchView("2.13.0", "13.0", False)
CPU = TorchView("2.13.0+cpu", None, False)
EIGHT = GpuEvidence(nvml=8, driver="580.95.05")


def test_signs_of_this_machine() -> None:
    assert devices.gpu_evidence({}, Nvml([Device()] * 8)) == EIGHT
    absent = Nvml(start=NVMLError_LibraryNotFound("NVML Shared Library Not Found"))
    assert devices.gpu_evidence({}, absent) == GpuEvidence() and not GpuEvidence()
    assert devices.gpu_evidence({"SLURM_GPUS_ON_NODE": "4"}, absent) == GpuEvidence(slurm=4)


@pytest.mark.parametrize(
    "wanted, torch, here, joined, cluster, expected",
    [
        ("auto", SEES, EIGHT, False, 0, "cuda"),
        ("auto", CPU, GpuEvidence(), False, 0, "cpu"),
        ("cpu", CPU, EIGHT, True, 32, "cpu"),  # explicitly set
        ("cuda", SEES, EIGHT, False, 0, "cuda"),
        ("cuda", BLIND, GpuEvidence(), True, 0, "cuda"),  # the driver of a cluster, on a node without a GPU
        ("cuda", CPU, GpuEvidence(), True, 0, "cuda"),
        ("auto", BLIND, GpuEvidence(), True, 32, "cuda"),
        ("auto", CPU, GpuEvidence(), True, 0, "cpu"),
        # … and on a machine with local GPUs outside the cluster
        ("cuda", CPU, GpuEvidence(1, "470.1"), True, 32, "cuda"),
        ("cuda", BLIND, GpuEvidence(1, "470.1"), True, 0, "cuda"),
        ("auto", BLIND, GpuEvidence(1, "470.1"), True, 32, "cuda"),
    ],
)
def test_the_device(
    wanted: str, torch: TorchView, here: GpuEvidence, joined: bool, cluster: int, expected: str
) -> None:
    assert choose_device(wanted, lambda: cluster, torch=torch, here=here, joined=joined) == expected


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    "torch, here, words",
    [
        (CPU, EIGHT, "here are 8 GPUs by NVML (driver 580.95.05), but torch 2.13.0+cpu is built without CUDA; run it"),
        (
            CPU,
            GpuEvidence(slurm=8),
            "here are 8 GPUs by SLURM_GPUS_ON_NODE, but torch 2.13.0+cpu is built without CUDA",
        ),
        (BLIND, GpuEvidence(8, "550.54"), "built for CUDA 13.0, which needs driver 580; this one is 550.54"),
        (
            TorchView("2.9", "12.8", False),
            GpuEvidence(8, "520.1"),
            "built for CUDA 12.8, which needs driver 525; this one is 520",
        ),
        (BLIND, EIGHT, "torch 2.13.0 (CUDA 13.0) sees none of them"),
    ],
)
def test_gpus_that_torch_does_not_see_are_no_reason_for_the_cpu(
    wanted: str, torch: TorchView, here: GpuEvidence, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError) as refused:
        choose_device(wanted, lambda: 0, torch=torch, here=here, joined=False)
    message = str(refused.value)
    assert message.startswith(f"cluster.device = {wanted}: ") and words in message and "cluster.device=cpu" in message
    assert "\n" not in message


def test_no_gpu_anywhere() -> None:
    with pytest.raises(UserError, match=r"^cluster.device = cuda: torch sees no CUDA device here; allowed is cpu or"):
        choose_device("cuda", lambda: 0.0, torch=CPU, here=GpuEvidence(), joined=False)


def test_a_cluster_with_gpus_and_a_driver_without_cuda() -> None:
    with pytest.raises(UserError, match=r"auto: the Ray cluster has 32 GPUs, but torch 2.13.0\+cpu is built without"):
        choose_device("auto", lambda: 32.0, torch=CPU, here=GpuEvidence(), joined=True)


@pytest.mark.parametrize(("here", "by"), [(GpuEvidence(slurm=8), "SLURM_GPUS_ON_NODE"), (EIGHT, "NVML")])
def test_a_node_with_gpus_and_a_cluster_without(here: GpuEvidence, by: str) -> None:
    with pytest.raises(UserError, match=f"auto: here are 8 GPUs by {by}.*, but the Ray cluster has none; start Ray"):
        choose_device("auto", lambda: 0.0, torch=SEES, here=here, joined=True)


def test_hidden_devices_are_named() -> None:
    assert "CUDA_VISIBLE_DEVICES is empty" in devices.why_no_gpu(BLIND, "580.1", {"CUDA_VISIBLE_DEVICES": ""})


def test_torch_here() -> None:
    import torch

    seen = devices.torch_view()
    assert (seen.version, seen.cuda, seen.sees) == (torch.__version__, torch.version.cuda, torch.cuda.is_available())
