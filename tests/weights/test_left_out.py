"""Test of a layer of packed experts that an update leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from tests.weights.test_delivery import layer_of, loaded_model, parameters_of


class Packing(UnquantizedFusedMoEMethod):
    """A kernel that packs experts by negating them; a second time would undo the packing."""

    unquantized_backend = UnquantizedMoeBackend.CPU
    moe_kernel = moe_quant_config = None

    def __init__(self) -> None:
        Module.__init__(self)
        self.calls = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.calls += 1
        layer.w13_weight.data.neg_()


def test_experts_without_a_new_weight_stay_packed_once() -> None:
    """Worker 1 holds a bias that is always zero, which an update of these experts sets."""
    model: Any = loaded_model(rank=1)
    layer_of(model["experts"], w13_bias=(2, 8), w2_bias=(2, 4))
    record_metadata_for_reloading(model)
    model["experts"].quant_method = method = Packing()
    before = {name: value.clone() for name, value in model["experts"].named_parameters()}
    parameters = parameters_of(model)
    parameters.open()
    for name in ("layer.weight", "layer.conv"):
        parameters[name].zero_()
        parameters.mark_written(name)
    assert parameters.close() == [] and not model["layer"].weight.any()
    assert method.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model["experts"].named_parameters())
