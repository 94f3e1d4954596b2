"""Tests of a critic: values computed from hidden states; training and checkpoints agree in every layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.config.schema import MoeConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import moments, objectives
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.blocks.value_head import VALUE
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.export.test_layouts import shorten_vocabulary
from tests.megatron import layouts
from tests.megatron.test_checkpoint import assert_same, held, put_together
from tests.support.engines import LOADING, build_model
from tests.support.ranks import run_ranks

NAMES = ("loss", "grad_norm", "clip_fraction", "value")
LAYOUTS = [
    pytest.param(2, {}, id="DP2"),
    pytest.param(2, {"tensor": 2}, id="TP2 ETP2"),
    pytest.param(2, {"pipeline": 2}, id="PP2"),
    pytest.param(2, {"context": 2}, id="CP2"),
    pytest.param(2, {"expert": 2}, id="EP2"),
    pytest.param(2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2 VPP2", marks=pytest.mark.slow),
    pytest.param(4, {"tensor": 2, "context": 2}, id="TP2 CP2", marks=pytest.mark.slow),
    pytest.param(
        2,
        {"context": 2, "context_exchange": "all_to_all"},
        id="CP2 by heads",
        marks=[pytest.mark.slow, pytest.mark.nightly],
    ),
]
SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-2)
"""Optimizer settings explained in `test_loss_layouts`."""


def model(path: Path, architecture: str = "qwen3_moe", head: bool = True, **sizes: Any) -> Path:
    """Writes a model of four layers, like a reward model with a separate head."""
    build_model(path, architecture, seed=3, layers=4, **sizes)
    shorten_vocabulary(path)  # odd, so that tensor parallelism pads the vocabulary
    if head:
        weights = load_file(path / "model.safetensors")
        hidden = weights["model.norm.weight"].shape[0]
        weights[VALUE] = 0.2 * torch.randn(1, hidden, generator=torch.Generator().manual_seed(5))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def turns() -> Sequences:
    """Returns trajectories of several answers, with NaN in the observations between."""
    rng = np.random.default_rng(3)
    batch = layouts.some_batch(100)
    tokens = len(batch.tokens)
    mask = np.where(np.repeat(rng.random(tokens // 4 + 1) < 0.3, 4)[:tokens], 0, 1).astype(np.float32)
    mask[batch.starts.numpy()] = 0
    batch["weights"] = token_weights(torch.from_numpy(mask), batch.lengths, "sequences")
    for name, scale in (("old_values", 0.5), ("returns", 1.0)):
        values = scale * rng.standard_normal(tokens)
        batch[name] = torch.from_numpy(np.where(mask == 0, np.nan, values).astype(np.float32))
    return batch


def read(opened: ModelWorker, rows: list[list[int]], micros: list[Sequences]) -> list[tuple[list[int], np.ndarray]]:
    """Returns the values of this rank's sequences; empty on ranks that return none."""
    values = opened.values(micros)
    at = opened.parallel.coordinates(torch.distributed.get_rank())
    return [] if values is None or at.tp or at.cp else [(r, v.numpy()) for r, v in zip(rows, values, strict=True)]


def train(rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig) -> Any:
    """Returns a rank's values, the metrics of three steps, and the values after the steps."""
    opened = layouts.open_rank(rank, address, path, parallel, policy, head="value")
    rows, micros = layouts.deal(turns(), opened)
    before = read(opened, rows, micros)
    steps = [opened.train(micros, objectives.value_objective(0.2)) for _ in range(3)]
    return before, steps, read(opened, rows, micros)


def together(answers: list[list[tuple[list[int], np.ndarray]]]) -> np.ndarray:
    """Returns the batch's values [T] from the ranks' values."""
    batch = turns()
    values_T = np.full(len(batch.tokens), np.nan)
    for rows, values in (pair for answer in answers for pair in answer):
        values_T[batch.index(rows).numpy()] = values
    return values_T


Story = tuple[np.ndarray, list[dict[str, float]], np.ndarray]


def story(path: Path, ranks: int, micro_tokens: int = 64, **sizes: int) -> Story:
    policy = layouts.policy_config(moe=MoeConfig(aux_loss=0.05), optimizer=SMOOTH, micro_tokens=micro_tokens)
    answers = run_ranks(ranks, train, path, layouts.layout(ranks, **sizes), policy)
    steps = max((a[1] for a in answers), key=lambda rows: len(rows[0]))
    return together([a[0] for a in answers]), steps, together([a[2] for a in answers])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("critic") / "model")


@pytest.fixture(scope="module")
def single(experts: Path) -> Story:
    """Returns the results of a single process with a single micro-batch."""
    return story(experts, 1, micro_tokens=10_000)


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_a_critic_trains_the_same_in_every_layout(
    experts: Path, single: Story, ranks: int, sizes: dict[str, Any]
) -> None:
    before, steps, after = story(experts, ranks, **sizes)
    for number, (a, b) in enumerate(zip(steps, single[1], strict=True)):
        for name in NAMES:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), f"step {number}, {name}"
    np.testing.assert_allclose(before, single[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after, single[2], rtol=1e-5, atol=1e-5)


def test_the_steps_move_it(single: Story) -> None:
    before, steps, after = single
    counts = turns()["weights"].numpy() != 0
    assert (before[~counts] == 0).all() and (before[counts] != 0).all()
    assert np.abs(after - before)[counts].mean() > 1e-3
    for first, second in pairwise(steps):
        assert first["loss"] != pytest.approx(second["loss"], rel=1e-3)
        assert 0.01 < first["clip_fraction"] < 0.9


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2"])
def test_values_are_the_head_times_the_hidden_states_before_the_token(tmp_path: Path, architecture: str) -> None:
    """Compares values with transformers' hidden states times the head. The second model has a tied output projection,
    unused by a critic."""
    path = model(tmp_path / "m", architecture, **({"tied": True, "head_dim": 16} if architecture == "qwen2" else {}))
    batch = turns()
    actual, _, _ = story(path, 2, pipeline=2)
    with LOADING:
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    head = load_file(path / "model.safetensors")[VALUE][0]
    expected = np.zeros(len(batch.tokens))
    for row, start in enumerate(batch.starts.tolist()):
        tokens = batch.tokens[start : start + int(batch.lengths[row])].long()
        with torch.no_grad():
            hidden = reference(tokens[None], output_hidden_states=True).hidden_states[-1][0]
        expected[start + 1 : start + len(tokens)] = (hidden @ head)[:-1]
    expected[batch["weights"].numpy() == 0] = 0
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def half_precision(rank: int, address: str, path: Path, parallel: ParallelDims) -> Any:
    """Trains a critic in bfloat16 and returns the head's dtype, the first values, the steps' metrics and all dtypes."""
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(), torch.bfloat16, "value")
    rows, micros = layouts.deal(turns(), opened)
    head = next(p for name, p in opened.params.items() if name.endswith("value_head.weight"))
    before = read(opened, rows, micros)
    steps = [opened.train(micros, objectives.value_objective(None)) for _ in range(3)]
    return str(head.dtype), before, steps, sorted({str(p.dtype) for p in opened.params.values()})


def test_a_new_head_has_value_0_and_stays_in_float32(tmp_path: Path) -> None:
    """Opens a critic from a policy's directory: no head in the files, the model in bfloat16, no output projection."""
    path = model(tmp_path / "m", head=False)
    for dtype, before, steps, types in run_ranks(2, half_precision, path, layouts.layout(2, tensor=2)):
        assert dtype == "torch.float32" and types == ["torch.bfloat16", "torch.float32"]
        assert all((values == 0).all() for _, values in before)
        assert steps[0]["loss"] > steps[1]["loss"] > steps[2]["loss"]


POLICY = layouts.policy_config(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=8, weight_decay=0.1))


def before(rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, dtype: torch.dtype) -> Any:
    """Takes two steps, saves a checkpoint, and takes another step."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY, dtype, "value")
    _, micros = layouts.deal(turns(), opened)
    for _ in range(2):
        opened.train(micros, objectives.value_objective(0.2))
    opened.save(folder)
    return held(opened), opened.train(micros, objectives.value_objective(0.2))


def after(rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, dtype: torch.dtype) -> Any:
    """Takes a step, restores the checkpoint over the step, and takes another step."""
    opened = layouts.open_rank(rank, address, path, parallel, POLICY, dtype, "value")
    _, micros = layouts.deal(turns(), opened)
    opened.train(micros, objectives.value_objective(0.2))
    opened.restore(folder)
    assert opened.schedule.num_steps == 2
    assert all(s["step"] == 2 for p in moments.inner_optimizers(opened.optimizer) for s in p.optimizer.state.values())
    return held(opened), opened.train(micros, objectives.value_objective(0.2))


Stage = tuple[int, Any, dict[str, int]]
"""Number of ranks, function of each rank, and the layout."""
STAGES: dict[torch.dtype, list[Stage]] = {
    torch.float32: [(4, before, {"tensor": 2, "pipeline": 2}), (2, after, {}), (2, after, {"pipeline": 2})],
    torch.bfloat16: [(2, before, {"tensor": 2}), (1, after, {})],
}


@pytest.mark.parametrize("dtype", STAGES, ids=str)
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path, dtype: torch.dtype) -> None:
    """Compares value head, moments, schedule and the next step bit by bit after a change of layout.

    In bfloat16 an optimizer group mixes the float32 head with parameters with float32 masters.
    """
    path, folder = model(tmp_path / "m", "qwen2", tied=True, head_dim=16), tmp_path / "checkpoint"
    folder.mkdir()
    first: dict[str, Any] = {}
    for ranks, function, sizes in STAGES[dtype]:
        parallel = layouts.layout(ranks, **sizes)
        answers = run_ranks(ranks, function, path, parallel, folder, dtype)
        state = put_together(path, parallel, [rank_state for rank_state, _ in answers], "value")
        row = max((row for _, row in answers), key=len)
        first = first or {"state": state, "row": row}
        assert_same(first["state"], state)
        assert state["param"][VALUE].any() and state["exp_avg"][VALUE].any() and "lm_head.weight" not in state["param"]
        for name, values in state["param"].items():
            rounded = torch.from_numpy(values).to(torch.float32 if name == VALUE else dtype).float().numpy()
            assert np.array_equal(rounded, state["weight"][name]), name
        for name in ("loss", "grad_norm", "lr"):
            assert row[name] == pytest.approx(first["row"][name], rel=1e-5 if dtype == torch.float32 else 1e-2)
