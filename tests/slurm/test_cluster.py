"""The cluster of the tests itself: real nodes, and no remains after any end of the owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Slurm, unavailable

MAKER = """
import sys, time
from pathlib import Path
from tests.slurm.cluster import cluster
with cluster(Path(sys.argv[1]), nodes=1, gpus=1) as slurm:
    print(slurm.controller, flush=True)
    time.sleep(300)
"""


def test_nodes_have_names_addresses_and_gpus_of_their_own(slurm: Slurm) -> None:
    output = slurm.run(
        "srun", "-N3", "--gpus-per-node=8", "sh", "-c", "echo $(hostname) $(hostname -i) $SLURM_GPUS_ON_NODE"
    )
    assert sorted(output.splitlines()) == [f"node{n} 10.77.0.{n} 8" for n in (1, 2, 3)]
    assert slurm.processes("node1") == [] and slurm.listening("node1") == []


def test_it_ends_with_a_maker_that_is_killed(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    command = [sys.executable, "-c", MAKER, str(tmp_path / "cluster")]
    maker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    controller = Path(f"/proc/{maker.stdout.readline().strip()}")
    assert controller.exists()
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    deadline = time.monotonic() + 20
    while controller.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not controller.exists()
    running = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running
