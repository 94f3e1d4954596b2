"""Gradients of experts' biases under sequence and expert parallelism, with megatron-core's own marks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from skyrl_mega.megatron import model, objectives
from tests.families import layouts
from tests.families.layouts import POLICY, RankResults, sizes_of
from tests.families.models import read_hf, read_reference, some_batch
from tests.families.test_layouts import GRADIENTS
from tests.megatron.layouts import deal, join_ranks, load_model
from tests.support.ranks import run_ranks

NAME, WHICH = "gpt_oss", "TP2·EP2"


def test_a_sum_of_other_experts_gradients_is_found(families: Path) -> None:
    """megatron-core marks the second bias of an expert for a sum over the tensor group: `mark_experts` left out."""
    ranks = run_ranks(2, _train_with_own_marks, families)
    hf, expected = read_hf(families / f"{NAME}-0"), read_reference(families / f"{NAME}.reference").gradients
    errors = layouts.gradient_errors(hf, sizes_of(NAME, WHICH)[1], ranks, expected)
    wrong = {tensor: error for tensor, error in errors.items() if not error < GRADIENTS}
    assert wrong.keys() == {f"model.layers.{layer}.mlp.experts.down_proj_bias" for layer in range(2)}
    assert min(wrong.values()) > 0.3


def _train_with_own_marks(rank: int, address: str, folder: Path) -> RankResults:
    join_ranks(rank, address, sizes_of(NAME, WHICH)[1])
    with mock.patch.object(model, "mark_experts", _mark_for_the_norm):
        worker = load_model(folder / f"{NAME}-0", sizes_of(NAME, WHICH)[1], POLICY)
    rows, micros = deal(some_batch(), worker)
    worker.train(micros, objectives.supervised)
    return RankResults(rows, gradients=layouts.gradients_of(worker))


def _mark_for_the_norm(chunk: torch.nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
