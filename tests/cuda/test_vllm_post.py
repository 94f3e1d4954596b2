"""Tests of weights in the order of CUDA kernels: an update must leave the same bits as a fresh load, at the addresses
held by CUDA graphs.

vLLM is the reference: tensors loaded from files by its loaders and post-processing are compared with the tensors after
our update. `vllm_worker` describes the simulated device.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.kernels.block_fp8 import block_amax_reference, quantise_reference, scales
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.fp8.format import SUFFIX, quantised, with_scales
from tests.cuda.vllm_worker import BLACKWELL, HOPPER, Pool, Worker, configuration, device, load
from tests.support.engines import build_model
from tests.support.ranks import run_ranks

MOE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "layers": 1, "experts": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("qwen3_moe", {**MOE, "expert_ffn": 256}),
    "padded": ("qwen3_moe", {**MOE, "expert_ffn": 192}),
    "tied": (
        "qwen2",
        {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 1, "ffn": 256, "tied": True},
    ),
}
"""Models by name. Experts of 192 columns need padding for kernels with multiples of 128, with one worker and with
two."""
ROUTER = {"ignore": [r"re:.*\.mlp\.gate$"]}
ONLINE = {"quantization": "fp8_per_block", "quantization_config": ROUTER}
PER_TENSOR = {"quantization": "fp8_per_tensor", "quantization_config": ROUTER}
FP8_FILES = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}
CHECKPOINT = {"hf_overrides": {"quantization_config": FP8_FILES}}
SECOND, SECOND_EXPERTS = {"tensor": 2, "rank": 1}, {"tensor": 2, "rank": 1, "expert_parallel": True}

CASES: dict[str, tuple[str, Worker, str]] = {
    f"{gpu_name} {name}": (model, replace(worker, gpu=gpu), backends[gpu])
    for gpu_name, gpu in {"hopper": HOPPER, "blackwell": BLACKWELL}.items()
    for name, (model, worker, backends) in {
        "experts": ("wide", Worker(HOPPER), {BLACKWELL: "FLASHINFER_TRTLLM"}),
        "padded experts of worker 1": (
            "padded",
            Worker(HOPPER, **SECOND),
            {HOPPER: "TRITON", BLACKWELL: "FLASHINFER_TRTLLM"},
        ),
        "whole experts of worker 1": (
            "padded",
            Worker(HOPPER, **SECOND_EXPERTS),
            {HOPPER: "TRITON", BLACKWELL: "FLASHINFER_TRTLLM"},
        ),
        "CUTLASS": (
            "wide",
            Worker(HOPPER, **SECOND, options={"moe_backend": "flashinfer_cutlass"}),
            {HOPPER: "FLASHINFER_CUTLASS"},
        ),
        "tied": ("tied", Worker(HOPPER, **SECOND), {BLACKWELL: ""}),
        "FP8": ("wide", Worker(HOPPER, options=ONLINE), {HOPPER: "TRITON", BLACKWELL: "FLASHINFER_TRTLLM"}),
        "FP8 padded": (
            "padded",
            Worker(HOPPER, **SECOND, options=ONLINE),
            {HOPPER: "TRITON", BLACKWELL: "FLASHINFER_TRTLLM"},
        ),
        "FP8 whole experts": (
            "wide",
            Worker(HOPPER, **SECOND_EXPERTS, options=ONLINE),
            {HOPPER: "FLASHINFER_CUTLASS", BLACKWELL: "FLASHINFER_TRTLLM"},
        ),
        "FP8 files": (
            "wide",
            Worker(HOPPER, **SECOND, options=CHECKPOINT),
            {HOPPER: "TRITON", BLACKWELL: "FLASHINFER_TRTLLM"},
        ),
        "FP8 files DeepGEMM": (
            "wide",
            Worker(HOPPER, **SECOND, options=CHECKPOINT | {"moe_backend": "deep_gemm"}),
            dict.fromkeys((HOPPER, BLACKWELL), "DEEPGEMM"),
        ),
    }.items()
    if gpu in backends
}
"""Name → model, worker, and the backend that vLLM must choose for the experts."""


def write_fp8(path: Path) -> Path:
    """Writes the model with block-scaled FP8 weights, in the hub's checkpoint format."""
    folder = path.with_name(f"{path.name}-fp8")
    folder.mkdir()
    weights = load_file(path / "model.safetensors")
    for name in quantised(weights):
        by_block = scales(block_amax_reference(weights[name]))
        weights |= {name: quantise_reference(weights[name], by_block), name + SUFFIX: by_block}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((path / "config.json").read_text())
    return folder


def shard_of(path: Path, worker: Worker) -> Shard:
    """Returns the worker's shard by our own layout, with scales if the files have scales."""
    hf = json.loads((path / "config.json").read_text())
    arch = architecture(hf)
    shard = arch.engine_shard(hf, worker.tensor, worker.rank, worker.expert_parallel)
    if "hf_overrides" in worker.options:
        layout = Layout(arch.tensors(hf), (shard,))
        shard = with_scales(layout, quantised(layout.tensors)).shards[0]
    return shard


def kernel_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns all tensors read by a forward pass: parameters, buffers, and tensors held by kernels."""
    tensors = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for name, module in model.named_modules():
        if hasattr(module, "shard_indices"):  # rows past the vocabulary are never read
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"][: module.shard_indices.num_org_elements]
        config = getattr(getattr(module, "quant_method", None), "moe_quant_config", None)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        for holder, held in (("config", config), ("kernel", kernel and kernel.fused_experts.quant_config)):
            for scale in ("w1_scale", "w2_scale"):
                if held is not None and getattr(held, scale) is not None:
                    tensors[f"{name}.{holder}.{scale}"] = getattr(held, scale).data
    return tensors


def update(parameters: Any, shard: Shard, path: Path, *, check: bool = False) -> list[str]:
    """Writes a worker's shard from the files in the order of a sync: a layer closes once all its parts are written."""
    tensors = load_file(path / "model.safetensors")
    parameters.open(check=check)
    for name in shard.params:
        for piece in shard.pieces:
            if piece.param == name:
                source = tensors[piece.tensor][piece.box.slices()]
                local_view(parameters[name], piece.offset, piece.box).copy_(source)
        parameters.mark_written(name)
    different: list[str] = parameters.close()
    return different


def same(a: Tensor, b: Tensor) -> bool:
    """Returns True if both tensors agree in bits, shape and dtype."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def rehearse_case(folder: Path, name: str) -> dict[str, Any]:
    """Runs two fresh loads, then an engine with dummy weights that takes updates."""
    from skyrl_mega.engines.vllm.transfer import ShardTransferEngine

    pool = Pool("weights")
    model_name, worker, _ = CASES[name]
    paths = [folder / f"{model_name}{seed}{'-fp8' if 'hf_overrides' in worker.options else ''}" for seed in (0, 1)]
    shard = shard_of(paths[0], worker)
    result: dict[str, Any] = {"wrong": []}
    with device(worker.gpu):
        fresh = []
        config = configuration(paths[0], worker)
        for path in paths:
            model = load(config, worker, path)
            fresh.append({n: t.clone() for n, t in kernel_tensors(model).items()})
        with pool:
            model = load(config, worker, paths[0], "dummy")
        experts = [m for m in model.modules() if hasattr(getattr(m, "quant_method", None), "experts_cls")]
        backends = {getattr(m.quant_method, "unquantized_backend", None) or m.quant_method.fp8_backend for m in experts}
        result["backend"] = "".join(b.name for b in backends)
        before = kernel_tensors(model)
        addresses = {n: (t.data_ptr(), t.stride()) for n, t in before.items()}
        assert {n for n, t in before.items() if not same(t, fresh[1][n])}  # dummy weights equal neither model
        engine = ShardTransferEngine(config.weight_transfer_config, config, torch.device("cpu"), model)
        engine.own_shard()  # raises unless the shard fills exactly the load-time parameters
        parameters = engine.parameters
        for which in (1, 0, 1):
            result["wrong"] += update(parameters, shard, paths[which])
            after = kernel_tensors(model)
            result["wrong"] += [f"{n}: bits" for n, t in fresh[which].items() if not same(t, after[n])]
            result["wrong"] += [
                f"{n}: address" for n, at in addresses.items() if at != (after[n].data_ptr(), after[n].stride())
            ]
            result["wrong"] += sorted(fresh[which].keys() ^ after.keys())
        result["check of the same"] = update(parameters, shard, paths[1], check=True)
        result["check of others"] = update(parameters, shard, paths[0], check=True)
        after = kernel_tensors(model)
        result["wrong"] += [f"{n}: changed by a check" for n, t in fresh[1].items() if not same(t, after[n])]
        result["wrong"] += [f"{n}: address" for n, at in addresses.items() if at[0] != after[n].data_ptr()]
        for module in model.modules():
            if hasattr(
                module, "shard_indices"
            ):  # no update sends the rows past the vocabulary; these are 0 after a wake
                module.weight.data[module.shard_indices.num_org_elements :] = 0
        result["stale"] = sleep(pool, model, parameters, lambda: update(parameters, shard, paths[1]))
        after = kernel_tensors(model)
        result["stale"] += [f"{n}: bits" for n, t in fresh[1].items() if not same(t, after[n])]
        result["stale"] += [f"{n}: address" for n, at in addresses.items() if at[0] != after[n].data_ptr()]
    return result


def sleep(pool: Pool, model: torch.nn.Module, parameters: Any, bring: Callable[[], Any]) -> list[str]:
    """Drops vLLM's load-time allocations, restores them and sends the same weights; returns still referenced tensors
    with different bytes."""
    from skyrl_mega.engines.presence import WEIGHTS
    from skyrl_mega.engines.vllm.sleep import CudaMemory, MemoryParts

    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in kernel_tensors(model).items()}
    in_use = pool.held()
    before = {at: content.clone() for at, content in pool.bytes().items() if at in in_use}
    parts = MemoryParts(model, parameters, [], CudaMemory(pool))
    for part in (WEIGHTS, WEIGHTS):
        parts.drop(part)
    garbage = [at for at, content in pool.bytes().items() if not bool((content == 0xFF).all())]
    parts.bring_back(WEIGHTS)
    bring()
    after = pool.bytes()
    stale = [at for at, content in before.items() if not torch.equal(content, after[at])]
    return [f"{names.get(at, 'of a kernel')} ({len(before[at])} bytes)" for at in stale] + [
        f"kept {at}" for at in garbage
    ]


def refusals(folder: Path) -> dict[str, Any]:
    """Runs the refused cases on Blackwell: a partly written re-packed layer, and scales over all workers."""
    from skyrl_mega.engines.vllm.params import LoadTimeParameters

    messages: dict[str, Any] = {}
    cpu, path = torch.device("cpu"), folder / "wide0"
    with device(BLACKWELL):
        worker = Worker(BLACKWELL)
        model = load(configuration(path, worker), worker, path)
        before = {n: (t.clone(), t.data_ptr()) for n, t in kernel_tensors(model).items()}
        parameters = LoadTimeParameters(model, cpu, torch.bfloat16)
        for check in (False, True):
            parameters.open(check=check)
            parameters["model.layers.0.mlp.experts.routed_experts.w13_weight"].fill_(1)
            parameters.mark_written("model.layers.0.mlp.experts.routed_experts.w13_weight")
            try:
                parameters.close()
            except RuntimeError as error:
                messages[f"part, check={check}"] = str(error)
            parameters.abandon()
        after = kernel_tensors(model)
        messages["changed"] = [n for n, (t, at) in before.items() if not same(t, after[n]) or at != after[n].data_ptr()]
        parameters.open()
        parameters.close()  # end of an update without parts
        messages["changed"] += [n for n, (t, _) in before.items() if not same(t, kernel_tensors(model)[n])]
        worker = Worker(BLACKWELL, options=PER_TENSOR)
        try:
            LoadTimeParameters(load(configuration(path, worker), worker, path), cpu, torch.bfloat16)
        except NotImplementedError as error:
            messages["per tensor"] = str(error)
        worker = Worker(BLACKWELL, **SECOND, options=CHECKPOINT)
        try:
            model = load(configuration(folder / "padded0", worker), worker, folder / "padded0", "dummy")
            LoadTimeParameters(model, cpu, torch.bfloat16)
        except NotImplementedError as error:
            messages["cut blocks"] = str(error)
    return messages


def rehearse(rank: int, _address: str, folder: Path) -> dict[str, Any]:
    """Runs all cases for one kind of GPU in a separate process. A failed case returns a traceback."""
    # vLLM would compile its quantiser here, which takes a minute.
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "TORCHDYNAMO_DISABLE": "1"}
    gpu = (HOPPER, BLACKWELL)[rank]
    results: dict[str, Any] = {"refusals": refusals(folder)} if gpu == BLACKWELL else {}
    for name, (_, worker, _) in CASES.items():
        if worker.gpu == gpu:
            try:
                results[name] = rehearse_case(folder, name)
            except Exception:
                results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, sizes) in MODELS.items():
        for seed in (0, 1):
            path = build_model(folder / f"{name}{seed}", kind, seed, **sizes)
            if name == "wide":
                write_fp8(path)
    hopper, blackwell = run_ranks(2, rehearse, folder, timeout=850)
    return hopper | blackwell


@pytest.mark.parametrize("case", CASES)
def test_updates_leave_what_a_fresh_load_would(found: dict[str, Any], case: str) -> None:
    """Runs three updates with a comparison of bits, a check that finds differences without a change, and a sleep."""
    result = found[case]
    assert isinstance(result, dict), result
    assert result["backend"] == CASES[case][2]
    assert result["wrong"] == []
    assert result["check of the same"] == []
    assert len(result["check of others"]) > 3
    assert result["stale"] == [], result["stale"]


def test_a_part_of_a_repacked_layer_changes_nothing(found: dict[str, Any]) -> None:
    refused = found["refusals"]
    missing = "the engine did not receive model.layers.0.mlp.experts.routed_experts.w2_weight"
    assert refused["part, check=False"] == refused["part, check=True"] == missing
    assert refused["changed"] == []


def test_blocks_that_a_cut_goes_through_are_refused(found: dict[str, Any]) -> None:
    """Cuts through blocks: vLLM would make smaller blocks, and no wire sends scales for smaller blocks."""
    message = found["refusals"]["cut blocks"]
    assert "a worker has 96 columns of an expert" in message and "leaves a multiple of 128" in message


def test_scales_over_all_workers_are_refused(found: dict[str, Any]) -> None:
    """Uses scales over all workers: such scales need a collective per layer, and workers close layers in different
    orders."""
    assert "allowed is rollout.options.quantization=fp8_per_block" in found["refusals"]["per tensor"]
