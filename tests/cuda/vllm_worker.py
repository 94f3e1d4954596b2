"""Simulated CUDA worker of a vLLM engine, on CPU tensors: vLLM's code loads and post-processes the model.

vLLM's classes ask the platform for the available kernels. The platform answers like a Hopper or Blackwell GPU, and vLLM
does the rest: backends, padded sizes, loading, post-processing, metadata for reloading. Code that needs a device is
replaced at the boundary. Functions of FlashInfer and DeepGEMM for the layout of weights are permutations of the same
shapes here; all further functions raise. Ranks above 0 belong to torch's fake process group. A worker needs a separate
process, because vLLM caches results.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOPPER, BLACKWELL = (9, 0), (10, 0)


@dataclass(frozen=True)
class Worker:
    """Identity of a worker in an engine."""

    gpu: tuple[int, int]
    """Compute capability."""
    tensor: int = 1
    rank: int = 0
    expert_parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Engine arguments of vLLM."""


# ---- what a device has -----------------------------------------------------------------------------------------------


def _rows(seed: int, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns a permutation of a matrix' rows. The permutation is not its own inverse, so a double application is
    visible."""
    rows = weight.shape[0]
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed + rows))


def _cached_rows(seed: int, cache: dict[Any, Tensor], weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns a cached permutation: FlashInfer caches permutations on the device, in a dict owned by vLLM."""
    key = seed, weight.shape
    if key not in cache:
        cache[key] = _rows(seed, weight)
    return cache[key]


def _required_layout(
    sf: Tensor, mn: int, k: int, recipe: tuple[int, int, int], num_groups: int, disable_ue8m0_cast: bool, **_: Any
) -> Tensor:
    """Returns DeepGEMM's layout of block scales: on Blackwell a scale per row, packed by four into an int32, row by
    row."""
    from vllm.platforms import current_platform

    if not current_platform.is_device_capability_family(100):
        return sf  # Hopper's kernel reads block scales unchanged
    assert not disable_ue8m0_cast and sf.shape[0] == num_groups
    rows = sf.index_select(-2, torch.arange(mn) // recipe[1])
    exponents = (rows.view(torch.int32) >> 23).to(torch.uint8)
    # Scales are powers of two, else the format loses bits.
    assert torch.equal((exponents.to(torch.int32) << 23).view(torch.float32), rows)
    columns = -(-rows.shape[-1] // 4) * 4
    packed = torch.zeros(*rows.shape[:-1], columns, dtype=torch.uint8)
    packed[..., : rows.shape[-1]] = exponents
    return packed.view(torch.int32).transpose(-1, -2).contiguous().transpose(-1, -2)


def _scaled_fp8(input: Tensor, scale: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Replacement of vLLM's operator for quantising with a given scale."""
    return (input.float() / scale).to(torch.float8_e4m3fn), scale


PACKAGES: dict[str, dict[str, Callable[..., Any]]] = {
    "flashinfer": {},
    "flashinfer.fused_moe": {},
    "flashinfer.fused_moe.core": {
        "_maybe_get_cached_w3_w1_permute_indices": functools.partial(_cached_rows, 1),
        "get_w2_permute_indices_with_cache": functools.partial(_cached_rows, 2),
    },
    "flashinfer.utils": {"get_shuffle_matrix_a_row_indices": functools.partial(_rows, 3)},
    "deep_gemm": {
        "transform_sf_into_required_layout": _required_layout,
        "get_mk_alignment_for_contiguous_layout": lambda: 128,
        "set_pdl": lambda enable: None,
    },
}
"""Packages of a CUDA environment, and the layout functions called for weights."""


def _package(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    functions = PACKAGES[name]

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute in functions:
            return functions[attribute]

        def called(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{name}.{attribute} needs a device")

        return called

    vars(module)["__getattr__"] = missing
    return module


@contextmanager
def device(gpu: tuple[int, int]) -> Iterator[None]:
    """Makes vLLM treat this process as a GPU process of the compute capability, with all packages installed."""
    import vllm.model_executor.models.qwen3_moe
    import vllm.v1.attention.backends.fa_utils  # noqa: F401  (asks for CUDA's extensions when it is imported)
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.utils import deep_gemm, flashinfer

    kind = type(current_platform)
    answers = {
        "_enum": PlatformEnum.CUDA,
        "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(*gpu)),
        "support_deep_gemm": classmethod(lambda cls: True),
        "supports_fp8": classmethod(lambda cls: True),
    }
    supported = [name for name in vars(_custom_ops) if "_supports_" in name or name.endswith("_gemm_supported")]
    with ExitStack() as stack:
        for name in PACKAGES:
            sys.modules[name] = _package(name)
            stack.callback(sys.modules.pop, name)
        stack.enter_context(mock.patch.dict(os.environ, {"VLLM_HAS_FLASHINFER_CUBIN": "1"}))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(kind, name, answer))
        for name in supported:  # kernels compiled into the wheel
            stack.enter_context(mock.patch.object(_custom_ops, name, return_value=True))
        stack.enter_context(mock.patch.object(_custom_ops, "scaled_fp8_quant", _scaled_fp8))
        for name in ("empty_cache", "max_memory_allocated", "reset_peak_memory_stats"):
            stack.enter_context(mock.patch.object(torch.accelerator, name, return_value=0))
        stack.enter_context(
            mock.patch.object(torch.accelerator, "current_device_index", return_value=torch.device("cpu"))
        )
        for module in (deep_gemm, flashinfer):
            for function in vars(module).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()
        yield


@contextmanager
def ranks(worker: Worker) -> Iterator[None]:
    """Creates vLLM's groups with this process as a rank; all further ranks are fake."""
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    new_group = dist.new_group
    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    patches = [
        mock.patch.object(dist, "new_group", lambda ranks=None, **_: new_group(ranks, backend="fake")),
        mock.patch.object(state, "in_the_same_node_as", return_value=[True] * worker.tensor),
        mock.patch.object(type(current_platform), "get_device_communicator_cls", classmethod(lambda cls: base)),
        mock.patch.object(shm_broadcast.MessageQueue, "create_from_process_group", return_value=None),
    ]
    dist.init_process_group("fake", rank=worker.rank, world_size=worker.tensor, store=FakeStore())
    try:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            state.init_distributed_environment(worker.tensor, worker.rank, "env://", 0, "fake")
            state.initialize_model_parallel(worker.tensor)
            yield
    finally:
        state.destroy_model_parallel()
        state.destroy_distributed_environment()


class Pool(TorchDispatchMode):
    """Replacement of vLLM's allocator for sleep mode (`CuMemAllocator`), reduced to the calls of a worker. Allocations
    in the context get a tag; `discard` overwrites tagged memory, and `wake_up` restores the same addresses."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag
        self.pointer_to_data: dict[int, Any] = {}
        self.storages: list[torch.UntypedStorage] = []
        """Storages referenced here, so that no address is reused."""
        self.asleep = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_filled = func is torch.ops.aten.lift_fresh.default  # torch.tensor has already filled the memory
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if not is_filled and _has_memory(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if _has_memory(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self.pointer_to_data:
                    handle = (0, storage.nbytes(), storage.data_ptr(), 0)
                    self.pointer_to_data[storage.data_ptr()] = SimpleNamespace(handle=handle, tag=self.tag)
                    self.storages.append(storage)
        return out

    def bytes(self) -> dict[int, Tensor]:
        """Returns the bytes of every storage, by address."""
        return {s.data_ptr(): torch.empty(0, dtype=torch.uint8).set_(s) for s in self.storages}

    def held(self) -> set[int]:
        """Returns the addresses of storages with further references."""
        return {s.data_ptr() for s in self.storages if torch._C._storage_Use_Count(s._cdata) > 1}

    def discard(self, tags: tuple[str, ...]) -> None:
        """Overwrites the tagged memory with NaN bytes, as vLLM's allocator drops the content."""
        if self.tag in tags:
            self.asleep = True
            for content in self.bytes().values():
                content.fill_(0xFF)

    def wake_up(self, tags: list[str]) -> None:
        """Marks the memory as awake, as vLLM's allocator does."""
        assert not self.asleep or self.tag in tags
        self.asleep = False


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "meta"


# ---- a worker --------------------------------------------------------------------------------------------------------


def load(config: Any, worker: Worker, path: Path, load_format: str = "auto") -> Module:
    """Loads a worker's model with vLLM from a Hugging Face directory. Must run within `device`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model

    config.model_config.model, config.load_config.load_format = str(path), load_format
    config.compilation_config.static_forward_context.clear()
    rotary_embedding._ROPE_DICT.clear()  # a worker has one model
    with set_current_vllm_config(config), ranks(worker):
        return get_model(vllm_config=config)


def configuration(path: Path, worker: Worker) -> Any:
    """Returns vLLM's configuration of the engine: created as for a CPU, to avoid a search for devices, then set to the
    worker."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    arguments = {"dtype": "bfloat16", "max_model_len": 128, "skip_tokenizer_init": True, "enforce_eager": True}
    with mock.patch.object(type(current_platform), "_enum", PlatformEnum.CPU):
        config = EngineArgs(model=str(path), **arguments | worker.options).create_engine_config()
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = worker.tensor
    parallel.rank, parallel.enable_expert_parallel = worker.rank, worker.expert_parallel
    return config
