"""Tests of the comparison of vLLM's parameters with a worker's shard: no parameter stays random unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module, ModuleDict, Parameter
from vllm.model_executor.layers.fused_moe import RoutedExperts

from skyrl_mega.engines.vllm import delivery, transfer
from skyrl_mega.engines.vllm.params import LoadTimeParameters
from skyrl_mega.engines.vllm.transfer import InitInfo, ShardTransferEngine, WorkerExtension
from skyrl_mega.parallel.box import Shard

SHAPES = {"layer.weight": (6, 4), "layer.conv": (6, 2), "experts.w13_weight": (2, 6, 4), "experts.w2_weight": (2, 4, 3)}
"""A worker's shard."""


def layer_of(module: Module, **shapes: tuple[int, ...]) -> Module:
    for name, shape in shapes.items():
        module.register_parameter(name, Parameter(torch.randn(shape)))
    return module


def loaded_model(rank: int = 0, width: int = 3) -> ModuleDict:
    """Returns a layer, its tied copy and padded experts, as vLLM has them after loading."""
    experts: Any = RoutedExperts.__new__(RoutedExperts)
    Module.__init__(experts)
    experts.moe_config = SimpleNamespace(
        intermediate_size_per_partition_unpadded=width,
        hidden_dim_unpadded=4,
        moe_parallel_config=SimpleNamespace(tp_rank=rank),
    )
    layer_of(experts, w13_weight=(2, 8, 4), w2_weight=(2, 4, 4))
    layer = layer_of(Module(), weight=(6, 4), conv=(6, 1, 2))
    tied = Module()
    tied.weight = layer.weight
    return ModuleDict({"layer": layer, "tied": tied, "experts": experts})


def parameters_of(model: Module) -> LoadTimeParameters:
    return LoadTimeParameters(model, torch.device("cpu"), torch.float32)


def test_a_shard_with_all_parameters_passes() -> None:
    """Compares with padded experts, a tied parameter, and a parameter with a further dimension of 1."""
    delivery.check(parameters_of(loaded_model()), Shard(SHAPES, ()))


def test_parameters_that_no_update_brings_are_named() -> None:
    model = loaded_model()
    layer_of(model["layer"], bias=(6,))
    layer_of(model["experts"], w13_bias=(2, 6))
    with pytest.raises(RuntimeError, match=r"would stay random: experts.w13_bias, layer.bias; .* in vLLM: none;"):
        delivery.check(parameters_of(model), Shard(SHAPES, ()))


def test_parameters_with_another_shape_or_without_a_place_are_named() -> None:
    shapes = {**SHAPES, "layer.weight": (3, 4), "layer.bias": (6,)}
    both = r"layer.bias \(6,\) \(vLLM: none\), layer.weight \(3, 4\) \(vLLM: \(6, 4\)\);"
    with pytest.raises(RuntimeError, match=f"would stay random: none; .* another shape in vLLM: {both}"):
        delivery.check(parameters_of(loaded_model()), Shard(shapes, ()))


def test_experts_of_another_width_are_named_despite_equal_padding() -> None:
    with pytest.raises(RuntimeError, match=r"experts.w13_weight .*\(2, 4, 4\)\), experts.w2_weight .*\(2, 4, 2\)\);"):
        delivery.check(parameters_of(loaded_model(width=2)), Shard(SHAPES, ()))


def test_biases_that_are_zero_and_scales_of_delivered_weights_may_be_absent() -> None:
    model = loaded_model(rank=1)
    layer_of(model["layer"], weight_scale_inv=(1, 1))
    layer_of(model["experts"], w13_bias=(2, 8), w2_bias=(2, 4))
    shard = Shard({**SHAPES, "experts.w13_bias": (2, 3, 2)}, ())
    delivery.check(parameters_of(model), shard)
    layer_of(model["layer"], other_scale_inv=(1, 1))
    with pytest.raises(RuntimeError, match=r"random: layer.other_scale_inv;"):
        delivery.check(parameters_of(model), shard)


def test_a_long_list_is_cut_with_the_number_of_the_rest() -> None:
    model = ModuleDict({f"layer{i}": layer_of(Module(), weight=(2,)) for i in range(10)})
    with pytest.raises(RuntimeError, match=r"random: layer0.weight, .*layer7.weight and 2 more;"):
        delivery.check(parameters_of(model), Shard({}, ()))


@pytest.mark.parametrize("way", ["start", "group", "files", "directory"])
def test_every_way_of_an_update_compares_before_it_begins(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_model()
    layer_of(model["layer"], bias=(6,))
    family = SimpleNamespace(engine_shard=lambda *_: Shard(SHAPES, ()), tensors=lambda _: {})
    monkeypatch.setattr(transfer, "architecture", lambda _: family)
    engine: Any = ShardTransferEngine.__new__(ShardTransferEngine)
    engine.parameters, engine.exchange, engine.download = parameters_of(model), None, None
    engine.model_config = SimpleNamespace(model="", hf_config=SimpleNamespace(to_dict=dict))
    sizes = {"tensor_parallel_size": 1, "data_parallel_size": 1, "data_parallel_index": 0}
    engine.parallel_config = SimpleNamespace(**sizes, enable_expert_parallel=False, rank=0)
    worker: Any = WorkerExtension()
    worker.weight_transfer_engine = engine
    before = {name: value.clone() for name, value in model.named_parameters()}
    begin: dict[str, Callable[[], Any]] = {
        "start": worker.check_parameters,
        "group": lambda: engine.init_transfer_engine(InitInfo({}, 0)),
        "files": lambda: worker.start_fetch({}),
        "directory": lambda: worker.load_files(str(tmp_path)),
    }
    with pytest.raises(RuntimeError, match=r"would stay random: layer.bias;"):
        begin[way]()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
