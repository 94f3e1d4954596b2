"""Tests of a convolution that vLLM packs for CPUs with AVX512-BF16, through updates, checks and sleep.

The CPU of the tests may not have these instructions, so a permutation stands for vLLM's packing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter
from vllm import _custom_ops
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from skyrl_mega.engines.vllm.params import LoadTimeParameters
from skyrl_mega.engines.vllm.sleep import MemoryParts, ProcessMemory

CHANNELS, TAPS = 96, 4
NAME = "conv1d.weight"


def packed(weight: Tensor) -> Tensor:
    """Returns a weight [channels, taps] in another order."""
    return weight.unflatten(0, (-1, 32)).transpose(1, 2).reshape(weight.shape).contiguous()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that returns a convolution with these weights, loaded and packed by vLLM."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(_custom_ops, "causal_conv1d_weight_pack", packed, raising=False)

    def load(weight: Tensor) -> ModuleDict:
        convolution: Any = Module()
        convolution.weight = Parameter(weight.clone(), requires_grad=False)
        convolution.quant_method = None
        model = ModuleDict({"conv1d": convolution})
        record_metadata_for_reloading(model)
        convolution.quant_method = UnquantizedLinearMethod()
        utils.dispatch_cpu_unquantized_gemm(convolution, remove_weight=True)
        return model

    return load


def update(parameters: LoadTimeParameters, weight: Tensor, check: bool = False) -> list[str]:
    parameters.open(check=check)
    parameters[NAME].copy_(weight)
    parameters.mark_written(NAME)
    return parameters.close()


def test_a_packed_convolution_is_that_of_a_fresh_load_after_an_update_and_after_sleep(loaded: Any) -> None:
    old, new = torch.randn(2, CHANNELS, 1, TAPS).bfloat16()
    model, fresh = loaded(old), loaded(new)
    live = model["conv1d"].weight
    assert live.shape == (CHANNELS, TAPS) and not torch.equal(live, fresh["conv1d"].weight)
    address = live.data_ptr()
    parameters = LoadTimeParameters(model, torch.device("cpu"), torch.bfloat16)
    assert parameters[NAME].shape == (CHANNELS, 1, TAPS)
    parameters.abandon()
    parts = MemoryParts(model, parameters, [], ProcessMemory(model))
    for asleep in (False, True):
        if asleep:
            parts.drop("engine_weights")
            parts.bring_back("engine_weights")
        assert update(parameters, new) == []
        for name in ("weight", "_cpu_unpacked_conv_weight"):
            assert torch.equal(getattr(model["conv1d"], name), getattr(fresh["conv1d"], name)), name
        assert model["conv1d"].weight.data_ptr() == address
        assert update(parameters, new, check=True) == []
    assert update(parameters, old, check=True) == [NAME]
    for name in ("weight", "_cpu_unpacked_conv_weight"):
        assert torch.equal(getattr(model["conv1d"], name), getattr(fresh["conv1d"], name)), "a check changes nothing"
