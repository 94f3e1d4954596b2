"""`benchmarks.driver` at a small size, and the random trajectories of the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import driver


def test_trajectories_are_whole() -> None:
    trajectories = driver.trajectories(2 * driver.GROUP, 200)
    assert [t.prompt.uid for t in trajectories] == [0] * driver.GROUP + [1] * driver.GROUP
    assert [t.turns for t in trajectories] == [driver.TURNS] * driver.GROUP + [1] * driver.GROUP
    for t in trajectories:
        assert len(t.tokens) == len(t.mask) == len(t.logprobs) == 200
        assert [s.start for s in t.steps] == [0, *(s.end for s in t.steps[:-1])] and t.steps[-1].end == 200
        policys = np.concatenate([np.full(s.end - s.start, s.kind.value == "response") for s in t.steps])
        assert np.array_equal(np.asarray(t.mask, bool), policys)
        assert not np.asarray(t.logprobs)[~policys].any()


def test_a_small_round_measures_everything(tmp_path: Path) -> None:
    file = tmp_path / "driver.json"
    command = [sys.executable, "-m", "benchmarks.driver", "--rounds", "1", "--output", str(file)]
    sizes = ["--trajectories", "16", "--tokens", "400", "--mini-batches", "2"]
    ended = subprocess.run([*command, *sizes], cwd=driver.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    costs = json.loads(file.read_text())["after"]
    assert costs["step_s"] > costs["batch_s"] > 0 and costs["write_s"] > 0
    assert costs["file_bytes"] > 4  # random ids of a large vocabulary do not compress below 17 bits
