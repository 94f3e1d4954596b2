"""Binding of a process to the CPUs nearest to the GPUs, within the CPUs allowed before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from skyrl_mega.cluster import numa
from tests.preflight.nvml import Device, Nvml, NVMLError_LibraryNotFound, NVMLError_NotSupported

HERE = sorted(os.sched_getaffinity(0))
NODES = [Device(cpus=HERE[:1])] * 4 + [Device(cpus=[*HERE[-1:], 63])] * 4


def test_the_cpus_of_devices() -> None:
    library = Nvml([Device(cpus=[0, 1, 5]), Device(cpus=[1, 7])])
    assert numa.nearest_cpus(["0"], library) == {0, 1, 5}
    assert numa.nearest_cpus(["GPU-1", "0"], library) == {0, 1, 5, 7}
    assert library.running == 0
    assert numa.nearest_cpus(["0"], Nvml(start=NVMLError_LibraryNotFound("none"))) == frozenset()
    unknown = Device(cpus=NVMLError_NotSupported("Not Supported"))
    assert numa.nearest_cpus(["0", "1"], Nvml([Device(cpus=[3]), unknown])) == frozenset()
    assert numa.text(frozenset({0, 1, 2, 5, 7, 8})) == "0-2,5,7-8"
    assert numa.visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-0a"}) == ["3", "GPU-0a"]
    assert numa.visible_devices({}) == numa.visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []


def bound(device: str) -> list[set[int]]:
    """Returns the CPUs of an earlier thread, a later thread and a child, after `bind`."""
    go, answers = threading.Event(), []

    def earlier() -> None:
        go.wait()
        answers.append(os.sched_getaffinity(0))

    threads = [threading.Thread(target=earlier)]
    threads[0].start()
    before = os.sched_getaffinity(0)
    try:
        assert numa.bind([device], Nvml(NODES)) == os.sched_getaffinity(0)
        threads.append(threading.Thread(target=lambda: answers.append(os.sched_getaffinity(0))))
        threads[1].start()
        child = "import os; print(*os.sched_getaffinity(0))"
        completed = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
        answers.append(set(map(int, completed.split())))
    finally:
        go.set()
        for thread in threads:
            thread.join()
        os.sched_setaffinity(0, before)
        for task in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(task), before)
            except ProcessLookupError:
                continue
    return answers


@pytest.mark.skipif(len(HERE) < 2, reason="one CPU cannot be two NUMA nodes")
def test_threads_that_are_there_and_children_stay_near_the_device() -> None:
    assert bound("2") == [{HERE[0]}] * 3
    assert bound("6") == [{HERE[-1]}] * 3  # CPU 63 is the device's too, but not this process's


def test_without_knowledge_nothing_changes() -> None:
    for devices, library in (
        ([], Nvml(NODES)),
        (["0"], Nvml([Device()])),
        (["0"], Nvml([Device(cpus=[1023])])),
        (["0"], Nvml(start=NVMLError_LibraryNotFound("none"))),
    ):
        assert numa.bind(devices, library) == frozenset()
        assert sorted(os.sched_getaffinity(0)) == HERE
