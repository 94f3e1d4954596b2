"""Tests of the copies of sinks that vLLM's attention backends make: made again by an update, and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Module, ModuleDict, Parameter
from vllm.model_executor.layers.attention import Attention

from skyrl_mega.engines.vllm import sinks
from skyrl_mega.engines.vllm.params import LoadTimeParameters

HEADS = 4


class Backend:
    """An attention backend that reads sinks in float32, as FlashInfer's."""

    def __init__(self, source: Parameter) -> None:
        self._sinks_source = source
        self.sinks: torch.Tensor = source

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        if self.sinks is self._sinks_source and self.sinks.dtype != torch.float32:
            self.sinks = self._sinks_source.to(torch.float32)
        elif self.sinks is not self._sinks_source:
            self.sinks.copy_(self._sinks_source)

    def get_impl_variants(self) -> tuple[Backend, ...]:
        return (self,)


def loaded_model(dtype: torch.dtype) -> tuple[ModuleDict, Backend]:
    """Returns a layer with sinks and its attention, as vLLM loads both, and the attention's backend."""
    layer: Any = Module()
    layer.sinks = Parameter(torch.randn(HEADS, dtype=dtype))
    backend = Backend(layer.sinks)
    backend.process_weights_after_loading(dtype)
    layer.attn = Attention.__new__(Attention)
    Module.__init__(layer.attn)
    layer.attn.impl = backend
    return ModuleDict({"layer": layer}), backend


def update(parameters: LoadTimeParameters, value: torch.Tensor, check: bool = False) -> list[str]:
    parameters.open(check=check)
    parameters["layer.sinks"].copy_(value)
    parameters.mark_written("layer.sinks")
    return parameters.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_copies_sinks_again_in_place(dtype: torch.dtype) -> None:
    model, backend = loaded_model(dtype)
    parameters = LoadTimeParameters(model, torch.device("cpu"), dtype)
    assert list(parameters) == ["layer.sinks"], "copies are not sent"
    assert [layer for layer, _ in parameters.sinks] == (["layer.attn"] if dtype == torch.bfloat16 else [])
    address, value = backend.sinks.data_ptr(), torch.randn(HEADS, dtype=dtype)
    assert update(parameters, value) == []
    assert torch.equal(backend.sinks, value.float()) and backend.sinks.data_ptr() == address
    assert update(parameters, value, check=True) == []
    assert update(parameters, value + 1, check=True) == ["layer.sinks"]


def test_every_variant_of_a_layers_backend_copies_sinks_again() -> None:
    model, backend = loaded_model(torch.bfloat16)
    other = Backend(backend._sinks_source)
    other.process_weights_after_loading(torch.bfloat16)
    backend.get_impl_variants = lambda: (backend, other)  # type: ignore[method-assign]
    parameters = LoadTimeParameters(model, torch.device("cpu"), torch.bfloat16)
    value = torch.randn(HEADS, dtype=torch.bfloat16)
    assert update(parameters, value) == []
    assert torch.equal(backend.sinks, value.float()) and torch.equal(other.sinks, value.float())


def test_a_check_finds_copies_that_an_update_left_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = loaded_model(torch.bfloat16)
    parameters = LoadTimeParameters(model, torch.device("cpu"), torch.bfloat16)
    value = torch.randn(HEADS, dtype=torch.bfloat16)
    with monkeypatch.context() as planted:
        planted.setattr(sinks, "derive", lambda *_: None)
        update(parameters, value)
    assert update(parameters, value, check=True) == ["layer.attn.sinks"]
    update(parameters, value)
    assert update(parameters, value, check=True) == []
