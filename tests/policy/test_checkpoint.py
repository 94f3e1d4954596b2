"""A checkpoint of one layout goes on in another as if nothing had happened."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.schema import BuildConfig, OptimizerConfig
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.tiny import build
from skyrl_mega.policy import objectives
from skyrl_mega.policy.sequences import Sequences
from tests.policy import layouts
from tests.support.ranks import run_ranks

POLICY = layouts.policy_config(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=8, weight_decay=0.1))


def before(rank: int, address: str, path: Path, parallel: Parallel, batch: Sequences, folder: Path) -> Any:
    """Two steps, a checkpoint, two more steps."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY)
    _, micros = layouts.deal(batch, opened)
    opened.train(micros, objectives.supervised)
    opened.train(micros, objectives.supervised)
    opened.save(folder)
    return [opened.train(micros, objectives.supervised) for _ in range(2)]


def after(rank: int, address: str, path: Path, parallel: Parallel, batch: Sequences, folder: Path, stray: int) -> Any:
    """`stray` steps that the checkpoint undoes, then two steps from the checkpoint."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY)
    _, micros = layouts.deal(batch, opened)
    for _ in range(stray):
        opened.train(micros, objectives.supervised)
    opened.restore(folder)
    return [opened.train(micros, objectives.supervised) for _ in range(2)]


def without_room(rank: int, address: str, path: Path, parallel: Parallel, folder: Path) -> str:
    """What saving says where the last rank may write no file of more than 1000 bytes."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY)
    if rank == parallel.ranks - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(RuntimeError) as caught:
        opened.save(folder)
    return str(caught.value)


LAYOUTS = {
    "single": (1, {}),
    "EP2 PP2": (4, {"pipeline": 2, "expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "DP2": (2, {}),
}


@pytest.mark.parametrize(
    ("saved", "resumed", "stray"),
    [
        ("single", "single", 1),
        ("EP2 PP2", "TP2", 0),
        ("TP2", "EP2 PP2", 1),
        ("PP2 VPP2", "DP2", 0),
        ("DP2", "PP2 VPP2", 0),
        ("EP2 PP2", "single", 0),
    ],
)
def test_saved_in_one_layout_resumed_in_another(tmp_path: Path, saved: str, resumed: str, stray: int) -> None:
    build(BuildConfig(layers=4), tmp_path / "model", seed=1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    batch = layouts.some_batch(100)
    ranks, sizes = LAYOUTS[saved]
    expected = run_ranks(ranks, before, tmp_path / "model", layouts.layout(ranks, **sizes), batch, folder)
    ranks, sizes = LAYOUTS[resumed]
    found = run_ranks(ranks, after, tmp_path / "model", layouts.layout(ranks, **sizes), batch, folder, stray)
    pairs = zip(max(found, key=lambda a: len(a[0])), max(expected, key=lambda a: len(a[0])), strict=True)
    for step, (a, b) in enumerate(pairs):
        for name in ("loss", "grad_norm", "lr"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), f"step {step}, {name}"


def test_every_rank_says_which_one_could_not_write_and_why(tmp_path: Path) -> None:
    build(BuildConfig(layers=4), tmp_path / "model", seed=1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    parallel = layouts.layout(2, tensor=2)
    for said in run_ranks(2, without_room, tmp_path / "model", parallel, folder):
        assert said.startswith("rank 1: RuntimeError: Worker failure") and "rank 0" not in said
