"""Tests of an optimizer in host memory: equal bits as on the device, and at most three pieces on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import objectives, worker
from skyrl_mega.megatron.streamed_optimizer import StreamedPart
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.megatron import layouts, test_residency
from tests.support.ranks import run_ranks

PIECE = 50_000
"""Bytes of a piece: the small model's optimizer has dozens of pieces."""
LARGE_PIECE = 20_000_000


def a_run(rank: int, address: str, paths: Any, parallel: ParallelDims, options: Any, folder: Path, turns: bool) -> Any:
    """Returns a policy's results in a run, and the final optimizer state from device or host."""
    worker.OPTIMIZER_PIECE = PIECE
    results, state = test_residency.a_run(rank, address, paths, parallel, options, folder, turns)
    return results, state


CASES = [
    (2, {"expert": 2}, {"overlap": True}, torch.bfloat16, "float32"),
    (2, {"expert": 2}, {"overlap": False}, torch.bfloat16, "bfloat16"),
    pytest.param(4, {"tensor": 2, "pipeline": 2}, {}, torch.float32, "float32", marks=pytest.mark.slow),
    pytest.param(2, {}, {"overlap": True}, torch.float32, "bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "sizes", "settings", "dtype", "small"), CASES)
def test_streaming_changes_no_bit(
    tmp_path: Path, ranks: int, sizes: dict[str, int], settings: dict[str, Any], dtype: torch.dtype, small: str
) -> None:
    """Compares losses, weights, checkpoints, restored state and a new optimizer, also with all other parts offloaded in
    turn."""
    paths = tmp_path / "own", tmp_path / "other"
    for seed, path in enumerate(paths):
        build(BuildConfig(), path, seed=seed + 1)
    answers = []
    for streamed, turns in ((False, False), (True, False), (True, True)):
        (folder := tmp_path / f"checkpoint-{streamed}-{turns}").mkdir()
        optimizer = OptimizerConfig(lr=1e-2, beta2=0.95, moments=small, streamed=streamed)
        args = paths, layouts.layout(ranks, **sizes), (layouts.policy_config(optimizer=optimizer, **settings), dtype)
        ran = run_ranks(ranks, a_run, *args, folder, turns)
        answers.append((ran, {file.name: file.read_bytes() for file in folder.iterdir()}))
    for ran, files in answers[1:]:
        np.testing.assert_equal(ran, answers[0][0])
        assert files == answers[0][1]


def memory_of_a_step(rank: int, address: str, path: Path, policy: PolicyConfig) -> Any:
    """Returns a process's bytes between steps, after five more steps, and the peak with a piece on the device."""
    worker.OPTIMIZER_PIECE = LARGE_PIECE
    torch.backends.mkldnn.set_flags(False)  # oneDNN keeps memory for every seen shape
    opened = layouts.open_rank(rank, address, path, layouts.layout(1), policy, torch.bfloat16)
    micros, seen, to_model = [layouts.some_batch(100, count=4)], [0], StreamedPart._to_model

    def noted(self: StreamedPart, piece: Any) -> None:
        seen.append(test_residency.memory())
        to_model(self, piece)

    def between_steps() -> int:
        opened.train(micros, objectives.supervised)
        opened.offload([])  # also releases memory kept by computation
        return test_residency.memory()

    before = between_steps()
    part: Any = StreamedPart
    part._to_model = noted
    return before, [between_steps() for _ in range(5)][-1], max(seen)


def test_a_process_holds_three_pieces_in_a_step_and_none_between_steps(tmp_path: Path) -> None:
    """Checks the memory of a model with 19 million parameters and 228 MB of optimizer state: a dozen pieces."""
    build(test_residency.LARGE, tmp_path / "model", seed=1)
    used = {}
    for streamed in (False, True):
        policy = layouts.policy_config(micro_tokens=200, optimizer=OptimizerConfig(lr=1e-3, streamed=streamed))
        ((before, after, most),) = run_ranks(1, memory_of_a_step, tmp_path / "model", policy)
        assert abs(after - before) < 12e6, "it does not grow"
        used[streamed] = before
    print(f"{(used[False] - used[True]) / 1e6:.0f} MB less between steps, {(most - before) / 1e6:.0f} MB more in one")
    assert used[False] - used[True] == pytest.approx(228e6, rel=0.05)
    assert most - before < 4.5 * LARGE_PIECE, "three, and what the C library keeps of those before"
