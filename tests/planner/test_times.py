"""Times that follow from every layer, not from the largest one."""

from __future__ import annotations

import pytest

from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.times import _exchange
from skyrl_mega.weights.plan.topology import Links
from tests.weights.grids import MODELS


@pytest.mark.parametrize(
    "parallel",
    [ParallelDims(8, tensor=2, expert=4), ParallelDims(4, expert=2, expert_tensor=2), ParallelDims(4, context=2)],
    ids=str,
)
def test_messages_are_those_of_every_layer(parallel: ParallelDims) -> None:
    hf = MODELS["qwen3_moe_mixed"]  # one of its layers is dense
    d = architecture(hf).describe(hf)
    layers = [_exchange(d.of_one_layer(d.layer(index)), parallel, Links(), 2) for index in range(d.layers)]
    assert len(d.kinds) == 2
    assert _exchange(d, parallel, Links(), 2) == pytest.approx(sum(layers) / d.layers)
    if parallel.expert > 1:
        assert min(layers) < max(layers)
