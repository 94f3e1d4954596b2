"""Tests of resuming a checkpoint in another layout, without a difference: real ranks, every element compared."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import MoeConfig, OptimizerConfig
from skyrl_mega.hf_checkpoint import box_files
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.megatron import moments, objectives
from skyrl_mega.megatron.model import finish_gather
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.registry import HeadKind, architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trainer.checkpoints import Checkpoints
from tests.export.test_layouts import shorten_vocabulary
from tests.megatron import layouts
from tests.support.engines import build_model
from tests.support.ranks import run_ranks

Arrays = dict[str, NDArray[np.float32]]
Held = tuple[dict[str, tuple[int, int, Arrays]], Arrays]
"""Parameter → first and last element of the rank's range with the optimizer state; and all whole parameters."""

POLICY = layouts.policy_config(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=8, weight_decay=0.1))
FROZEN = layouts.policy_config(optimizer=OptimizerConfig(lr=1e-2), moe=MoeConfig(freeze_router=True))
BATCH = layouts.some_batch(100)

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "alone": (1, {}),
    "DP2": (2, {}),
    "DP3": (3, {}),
    "TP2": (2, {"tensor": 2}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2 EP2 PP2": (4, {"tensor": 2, "expert": 2, "pipeline": 2}),
    "TP2 EP2 ETP2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "PP2 VPP2 EP2": (4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}),
    "uneven PP2 CP2": (4, {"pipeline": 2, "context": 2, "first_stage_layers": 1, "last_stage_layers": 3}),
}


def held(rank: ModelWorker) -> Held:
    """Returns a rank's optimizer state and model. The master of a float32 parameter shares the parameter's memory."""
    finish_gather(rank.chunks)
    names, runs = {id(p): name for name, p in rank.params.items()}, {}
    for part in moments.inner_optimizers(rank.optimizer):
        at = {t.data_ptr(): t for group in part.optimizer.param_groups for t in group["params"]}
        for p in part.model_param_group_index_map:
            run = part._get_model_param_range_map(p)["param"]
            master = at[p.data_ptr() + 4 * run.start] if p.dtype == torch.float32 else p.main_param
            state = {"param": master, **part.optimizer.state[master]}
            arrays = {kind: t.detach().float().numpy().copy() for kind, t in state.items()}
            runs[names[id(p)]] = (run.start, run.end, arrays)
    return runs, {name: p.detach().float().numpy().copy() for name, p in rank.params.items()}


def put_together(path: Path, parallel: ParallelDims, ranks: list[Held], head: HeadKind = "vocab") -> dict[str, Arrays]:
    """Returns the Hugging Face tensors of all ranks by kind. Every element must exist, and replicas must agree bit by
    bit."""
    hf = read_config(path)
    shapes = architecture(hf, head).tensors(hf)
    tensors_of = {
        kind: {t: np.full(s, np.nan, np.float32) for t, s in shapes.items()}
        for kind in ("param", "exp_avg", "exp_avg_sq", "weight")
    }
    for number, (runs, weights) in enumerate(ranks):
        shard = architecture(hf, head).megatron_shard(hf, parallel, number, "local")
        for kind, tensors in tensors_of.items():
            for piece in shard.pieces:
                flat = np.full(weights[piece.param].size, np.nan, np.float32)
                if kind == "weight":
                    flat[:] = weights[piece.param].reshape(-1)
                elif piece.param in runs:
                    start, stop, state = runs[piece.param]
                    flat[start:stop] = state[kind]
                at = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.box.shape, strict=True))
                local, into = flat.reshape(weights[piece.param].shape)[at], tensors[piece.tensor][piece.box.slices()]
                assert np.array_equal(local[both := ~np.isnan(local) & ~np.isnan(into)], into[both]), piece
                np.copyto(into, local, where=~np.isnan(local))
    frozen = {t for t in shapes if np.isnan(tensors_of["param"][t]).all()}
    for kind, tensors in tensors_of.items():
        lacking = {t for t, values in tensors.items() if np.isnan(values).any()}
        assert lacking == (frozen if kind != "weight" else set()), kind
    return tensors_of


def assert_same(a: dict[str, Arrays], b: dict[str, Arrays]) -> None:
    """Compares every bit of every tensor of every kind."""
    for kind, tensors in a.items():
        for name, values in tensors.items():
            assert values.tobytes() == b[kind][name].tobytes(), f"{kind} of {name}"


def trains(parallel: ParallelDims) -> bool:
    """Returns True if the layout can train: gloo cannot reduce-scatter uneven parts with expert and expert-tensor
    parallelism."""
    return parallel.expert_tensor == 1 or parallel.expert == 1


def before(rank: int, address: str, path: Path, parallel: ParallelDims, options: Any, folder: Path) -> Any:
    """Takes two steps, saves, takes another step. Returns the state at the checkpoint, the step's metrics, the final
    state."""
    policy, dtype = options
    opened = layouts.open_rank(rank, address, path, parallel, policy, dtype)
    _, micros = layouts.deal(BATCH, opened)
    for _ in range(2):
        opened.train(micros, objectives.supervised)
    opened.save(folder)
    saved = held(opened)
    return saved, opened.train(micros, objectives.supervised), held(opened)


def after(rank: int, address: str, path: Path, parallel: ParallelDims, options: Any, folder: Path) -> Any:
    """Takes a step, restores the checkpoint over the step, and takes another step."""
    policy, dtype = options
    opened = layouts.open_rank(rank, address, path, parallel, policy, dtype)
    _, micros = layouts.deal(BATCH, opened)
    if trains(parallel):
        opened.train(micros, objectives.supervised)
    opened.restore(folder)
    restored, steps = held(opened), opened.schedule.num_steps
    assert steps == 2 and all(
        s["step"] == 2 for p in moments.inner_optimizers(opened.optimizer) for s in p.optimizer.state.values()
    )
    row = opened.train(micros, objectives.supervised) if trains(parallel) else {}
    return restored, row, held(opened)


def run(name: str, function: Callable[..., Any], path: Path, options: Any, folder: Path) -> Any:
    """Returns the state at the checkpoint, the metrics of the next step, and the state after the step."""
    ranks, sizes = LAYOUTS[name]
    parallel = layouts.layout(ranks, **sizes)
    answers = run_ranks(ranks, function, path, parallel, options, folder)
    rows = max((row for _, row, _ in answers), key=len)
    return (
        put_together(path, parallel, [state for state, _, _ in answers]),
        rows,
        put_together(path, parallel, [state for _, _, state in answers]),
    )


class Saved:
    """A checkpoint of real ranks, and the ranks' states."""

    def __init__(self, root: Path, layout: str, options: Any, kind: str, **model: Any) -> None:
        self.path, self.folder, self.options, self.layout = root / "model", root / "checkpoint", options, layout
        build_model(self.path, kind, seed=3, layers=4, **model)
        shorten_vocabulary(self.path)  # odd, so that tensor parallelism pads the vocabulary
        self.folder.mkdir()
        self.state, self.row, self.later = run(layout, before, self.path, options, self.folder)

    def check(self, layout: str) -> None:
        """Resumes in a layout and compares the state and the next step."""
        state, row, later = run(layout, after, self.path, self.options, self.folder)
        assert_same(self.state, state)
        if layout == self.layout:
            assert row == self.row
            assert_same(self.later, later)
        elif row and self.options[1] == torch.float32:
            assert row["lr"] == self.row["lr"] and row["loss"] == pytest.approx(self.row["loss"], rel=1e-6)
            assert row["grad_norm"] == pytest.approx(self.row["grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("experts"), "TP2 EP2 PP2", (POLICY, torch.float32), "qwen3_moe")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns the checkpoint of a dense model with biases and a tied head, in bfloat16 with float32 masters."""
    options = (POLICY, torch.bfloat16)
    return Saved(tmp_path_factory.mktemp("tied"), "TP2 PP2", options, "qwen2", tied=True, head_dim=16)


@pytest.mark.parametrize("layout", ["TP2 EP2 PP2", "alone", "DP3", "PP2 VPP2 EP2", "uneven PP2 CP2", "TP2 EP2 ETP2"])
def test_experts_saved_in_one_layout_are_the_same_in_any(experts: Saved, layout: str) -> None:
    experts.check(layout)


@pytest.mark.parametrize("layout", ["TP2 PP2", "alone", "DP2", "PP2 VPP2", "TP2"])
def test_a_tied_model_saved_in_one_layout_is_the_same_in_any(tied: Saved, layout: str) -> None:
    tied.check(layout)


def test_a_frozen_router_is_saved_once_and_comes_back(tmp_path: Path) -> None:
    Saved(tmp_path, "DP3", (FROZEN, torch.bfloat16), "qwen3_moe").check("TP2 EP2 PP2")


def without_room(rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path) -> str:
    """Returns the error of a save; the last rank may write no file of more than 1000 bytes."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY)
    if rank == parallel.ranks - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(RuntimeError) as caught:
        opened.save(folder)
    return str(caught.value)


def test_every_rank_says_which_one_could_not_write_and_why(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3_moe", seed=1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    parallel = layouts.layout(2, tensor=2)
    for message in run_ranks(2, without_room, tmp_path / "model", parallel, folder):
        assert message.startswith("rank 1: OSError: [Errno 27] File too large") and "rank 0" not in message
    assert not (folder / "checkpoint.json").exists()


def refused(rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, policy: Any, spoils: Any) -> Any:
    """Returns the errors of several restores, each after a further fault in the file."""
    opened, messages = layouts.open_rank(rank, address, path, parallel, policy), []
    for spoil in spoils:
        if rank == 0:
            spoil(folder / "rank_00001.safetensors")
        dist.barrier()
        with pytest.raises(UserError) as caught:
            opened.restore(folder)
        messages.append(str(caught.value))
        dist.barrier()
    return messages


def once(rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, policy: Any) -> None:
    layouts.open_rank(rank, address, path, parallel, policy).save(folder)


def nothing(file: Path) -> None:
    """Leaves the file unchanged."""


def one_bit(file: Path) -> None:
    """Flips a bit of an element."""
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def half(file: Path) -> None:
    """Truncates the file to its first half."""
    os.truncate(file, file.stat().st_size // 2)


def test_what_cannot_be_restored_is_refused_in_one_line_on_every_rank(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3_moe", seed=1, layers=1)
    build_model(tmp_path / "other", "qwen3_moe", seed=1, layers=2)
    folder, parallel = tmp_path / "checkpoint", layouts.layout(2, expert=2)
    folder.mkdir()
    run_ranks(2, once, tmp_path / "model", parallel, folder, FROZEN)

    def said(path: Path, policy: Any, *spoils: Any) -> list[str]:
        first, second = run_ranks(2, refused, path, parallel, folder, policy, spoils)
        assert first == second and not any("\n" in line for line in first)
        return list(first)

    (other,) = said(tmp_path / "other", FROZEN, nothing)
    assert "is of another model: model.layers.1.input_layernorm.weight" in other
    (trained,) = said(tmp_path / "model", POLICY, nothing)
    assert "mlp.gate.weight" in trained and "freeze_router" in trained
    bit, cut, gone = said(tmp_path / "model", FROZEN, one_bit, half, Path.unlink)
    assert "rank_00001.safetensors" in bit and "CRC-32" in bit
    assert "rank_00001.safetensors: has" in cut and "rank_00001.safetensors: is missing" in gone


def killed(rank: int, address: str, path: Path, parallel: ParallelDims, newest: Path, folder: Path) -> None:
    """Resumes from a checkpoint and kills the last rank in the middle of the next save."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY)
    opened.restore(newest)
    opened.train(layouts.deal(BATCH, opened)[1], objectives.supervised)
    if rank == parallel.ranks - 1:
        write, count = box_files._pwrite, iter(range(20))

        def kill(*arguments: Any) -> None:
            write(*arguments)
            if next(count) == 10:
                os.kill(os.getpid(), signal.SIGKILL)

        box_files._pwrite = kill
    opened.save(folder)


def test_a_rank_that_is_killed_in_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path, name, options = build_model(tmp_path / "model", "qwen3_moe", seed=3), "DP3", (POLICY, torch.float32)
    ranks, sizes = LAYOUTS[name]
    checkpoints = Checkpoints(tmp_path, keep=2)
    answers: list[Any] = []
    first = checkpoints.save(1, {}, {"policy": lambda folder: answers.extend(run(name, before, path, options, folder))})
    # The first error is the killed rank's silence or the error of a waiting rank.
    with pytest.raises(RuntimeError, match=r"ended without an answer|by peer"):
        checkpoints.save(
            2,
            {},
            {
                "policy": lambda folder: run_ranks(
                    ranks, killed, path, layouts.layout(ranks, **sizes), first / "policy", folder
                )
            },
        )
    left = tmp_path / "step_000002.partial" / "policy"
    assert (left / f"rank_{ranks - 1:05d}.safetensors").stat().st_size and not (left / "checkpoint.json").exists()
    assert checkpoints.newest() == first
    state, row, later = run(name, after, path, options, first / "policy")
    assert_same(answers[0], state)
    assert row == answers[1]
    assert_same(answers[2], later)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["saved with, loaded without", "saved without, loaded with"])
def test_overlap_changes_nothing_of_a_checkpoint(tmp_path: Path, overlap: bool) -> None:
    """Saves and loads right after an overlapping step: the gather of parameters is open until the next forward pass."""
    with_it, other = (replace(POLICY, overlap=on) for on in (overlap, not overlap))
    saved = Saved(tmp_path, "DP2", (with_it, torch.float32), "qwen3_moe")
    state, row, _ = run("DP2", after, saved.path, (other, torch.float32), saved.folder)
    assert_same(saved.state, state)
    assert row["loss"] == pytest.approx(saved.row["loss"], rel=1e-6)
