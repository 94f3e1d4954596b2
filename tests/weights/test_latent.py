"""Tests of the tensors that vLLM's latent attention derives from a weight: made again by an update, and compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module, ModuleDict, Parameter
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from skyrl_mega.engines.vllm import latent
from skyrl_mega.engines.vllm.params import LoadTimeParameters

HEADS, LATENT, PLAIN, VALUE = 2, 8, 3, 5
DERIVED = ["attention.W_UV", "attention.W_UK_T"]


def loaded_model(*, copies: bool) -> ModuleDict:
    """Returns a projection and its attention as vLLM loads both; with `copies` the derived tensors have memory of their
    own, as with a quantised projection."""
    projection: Any = Module()
    projection.weight = Parameter(torch.randn(HEADS * (PLAIN + VALUE), LATENT))
    projection.quant_method = None
    attention: Any = MLAAttention.__new__(MLAAttention)
    Module.__init__(attention)
    vars(attention).update(
        kv_lora_rank=LATENT,
        num_heads=HEADS,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUE,
        impl=SimpleNamespace(process_weights_after_loading=lambda dtype: None),
        is_amx_bmm_enabled=False,
        dcp_q_replicate=False,
        is_aiter_triton_fp4_bmm_enabled=False,
        is_aiter_triton_fp8_bmm_enabled=False,
        quant_config=None,
    )
    vars(attention)["kv_b_proj"] = projection  # not a submodule here: named once, under its own name
    set_default_quant_scales(attention, register_buffer=True)
    attention.process_weights_after_loading(torch.float32)
    if copies:
        for name in ("W_UV", "W_UK_T"):
            setattr(attention, name, Parameter(getattr(attention, name).detach().clone()))
    return ModuleDict({"kv_b_proj": projection, "attention": attention})


def update(parameters: LoadTimeParameters, value: torch.Tensor, check: bool = False) -> list[str]:
    parameters.open(check=check)
    parameters["kv_b_proj.weight"].copy_(value)
    parameters.mark_written("kv_b_proj.weight")
    return parameters.close()


@pytest.mark.parametrize("copies", [False, True])
def test_an_update_makes_derived_tensors_again_in_place(copies: bool) -> None:
    model = loaded_model(copies=copies)
    attention: Any = model["attention"]
    parameters = LoadTimeParameters(model, torch.device("cpu"), torch.float32)
    assert list(parameters) == ["kv_b_proj.weight"], "derived tensors are not sent"
    addresses = attention.W_UV.data_ptr(), attention.W_UK_T.data_ptr()
    value = torch.randn(HEADS * (PLAIN + VALUE), LATENT)
    parameters.undefined = True  # as after sleep: every parameter has to arrive
    assert update(parameters, value) == []
    heads = value.view(HEADS, PLAIN + VALUE, LATENT)
    assert torch.equal(attention.W_UK_T, heads[:, :PLAIN])
    assert torch.equal(attention.W_UV, heads[:, PLAIN:].transpose(1, 2))
    assert addresses == (attention.W_UV.data_ptr(), attention.W_UK_T.data_ptr())
    assert update(parameters, value, check=True) == []
    assert update(parameters, value + 1, check=True) == ["kv_b_proj.weight"]


def test_a_check_finds_derived_tensors_that_an_update_left_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = LoadTimeParameters(loaded_model(copies=True), torch.device("cpu"), torch.float32)
    value = torch.randn(HEADS * (PLAIN + VALUE), LATENT)
    with monkeypatch.context() as planted:
        planted.setattr(latent, "derive", lambda *_: None)
        update(parameters, value)
    assert update(parameters, value, check=True) == DERIVED
    update(parameters, value)
    assert update(parameters, value, check=True) == []


def test_weights_packed_for_amx_are_refused() -> None:
    model = loaded_model(copies=False)
    model["attention"].is_amx_bmm_enabled = True  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match=r"attention, packed for AMX, .*\.attention_config={backend"):
        LoadTimeParameters(model, torch.device("cpu"), torch.float32)
