"""Every family in every layout: log-probs and gradients of transformers, exports, checkpoints, router replay."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.registry import architecture
from tests.families import layouts
from tests.families.layouts import EXPORTED, LAYOUTS, RESUMED, SAVED, RankResults, sizes_of
from tests.families.models import MODELS, read_hf, read_reference
from tests.support.ranks import run_ranks

LOGPROBS = 1e-4
"""Largest difference of a log-prob from transformers'."""
GRADIENTS = 1e-3
"""Largest difference of a gradient from transformers', relative to the tensor's largest gradient."""


@pytest.fixture(scope="module")
def results(families: Path) -> dict[str, dict[str, list[RankResults]]]:
    """Returns layout → model → results of every rank."""
    return {which: sweep(families, which) for which in LAYOUTS}


def sweep(families: Path, which: str) -> dict[str, list[RankResults]]:
    names = [name for name in MODELS if fits(families, name, which)]
    ranks = run_ranks(LAYOUTS[which][0], layouts.sweep, families, which, names)
    return {name: [rank[name] for rank in ranks] for name in names}


def fits(families: Path, name: str, which: str) -> bool:
    """Returns False if the model refuses the layout."""
    hf = read_hf(families / f"{name}-0")
    try:
        architecture(hf).check_layout(hf, sizes_of(name, which)[1])
    except UserError:
        return False
    return True


@pytest.mark.parametrize("which", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_transformers(
    families: Path, results: dict[str, dict[str, list[RankResults]]], which: str
) -> None:
    wrong = {}
    for name, ranks in results[which].items():
        expected, path = read_reference(families / f"{name}.reference"), families / f"{name}-0"
        assert expected.logprobs.std() > 0.5  # a nearly uniform distribution would hide faults
        difference = float(np.abs(layouts.joined_logprobs(ranks) - expected.logprobs).max())
        if not difference < LOGPROBS:
            wrong[name, "log-probs"] = difference
        errors = layouts.gradient_errors(read_hf(path), sizes_of(name, which)[1], ranks, expected.gradients)
        wrong |= {(name, tensor): error for tensor, error in errors.items() if not error < GRADIENTS}
    assert not wrong
    assert results[which], "no family takes the layout"


@pytest.mark.parametrize("which", LAYOUTS)
def test_the_gradient_norm_counts_every_gradient_once(
    families: Path, results: dict[str, dict[str, list[RankResults]]], which: str
) -> None:
    for name, ranks in results[which].items():
        gradients = read_reference(families / f"{name}.reference").gradients.values()
        expected = math.sqrt(sum(float(np.square(values, dtype=np.float64).sum()) for values in gradients))
        assert max(rank.norm for rank in ranks) == pytest.approx(expected, rel=1e-4), name


def test_a_planted_fault_is_found(families: Path, results: dict[str, dict[str, list[RankResults]]]) -> None:
    """Doubles the gradient of a norm on one rank, and leaves out the gradient of a router."""
    which, name = "TP2·EP2", "qwen3_moe"
    ranks, expected = results[which][name], read_reference(families / f"{name}.reference").gradients
    norm, router = "0.decoder.layers.1.input_layernorm.weight", "0.decoder.layers.1.mlp.router.weight"
    planted = [
        replace(ranks[0], gradients={k: v for k, v in ranks[0].gradients.items() if k != router}),
        replace(ranks[1], gradients=ranks[1].gradients | {norm: (0, 2 * ranks[1].gradients[norm][1])}),
    ]
    del planted[1].gradients[router]
    errors = layouts.gradient_errors(read_hf(families / f"{name}-0"), sizes_of(name, which)[1], planted, expected)
    wrong = {tensor: error for tensor, error in errors.items() if not error < GRADIENTS}
    layer = "model.layers.1"
    assert wrong == {
        f"{layer}.input_layernorm.weight": pytest.approx(1, rel=1e-3),
        f"{layer}.mlp.gate.weight": math.inf,
    }


@pytest.mark.parametrize("which", LAYOUTS)
def test_routers_take_the_given_experts(
    families: Path, results: dict[str, dict[str, list[RankResults]]], which: str
) -> None:
    """Compares with transformers under forced routes; the pass itself raises if a token goes elsewhere."""
    for name, ranks in results[which].items():
        expected = read_reference(families / f"{name}.reference")
        actual = layouts.joined_logprobs(ranks, replayed=True)
        np.testing.assert_allclose(actual, expected.replayed, atol=LOGPROBS, err_msg=name)
        assert np.abs(expected.replayed - expected.logprobs).max() > 0.1  # the routes are others than the model's


def test_an_export_is_the_source_bit_by_bit(families: Path, results: dict[str, dict[str, list[RankResults]]]) -> None:
    for name in results[EXPORTED]:
        source, exported = (
            load_file(families / f"{name}{which}" / "model.safetensors") for which in ("-0", "-exported")
        )
        assert source.keys() == exported.keys()
        for tensor, values in source.items():
            assert values.dtype == exported[tensor].dtype and values.tobytes() == exported[tensor].tobytes(), tensor


def test_a_checkpoint_resumes_in_another_layout(
    families: Path, results: dict[str, dict[str, list[RankResults]]]
) -> None:
    assert {*MODELS} == results[SAVED].keys() == results[RESUMED].keys()
    for name in MODELS:
        hf, states, steps = read_hf(families / f"{name}-0"), [], []
        for which in (SAVED, RESUMED):
            ranks = results[which][name]
            states.append(layouts.joined_weights(hf, sizes_of(name, which)[1], ranks))
            steps.append(max((rank.next_step for rank in ranks), key=len))
        for tensor, values in states[0].items():
            assert values.tobytes() == states[1][tensor].tobytes(), (name, tensor)
        for metric in ("loss", "grad_norm", "lr"):
            assert steps[0][metric] == pytest.approx(steps[1][metric], rel=1e-5), (name, metric)
