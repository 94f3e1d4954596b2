"""`make cuda-check`: what was installed into .venv-cuda is what the project was written for. Needs no GPU.

Each part runs in a process of its own, and prints a table. Exit code 1: something differs, and is named.

    imports   every package that a run on GPUs uses can be imported, and they load one cuDNN, the environment's
    policy    Megatron's model with Transformer Engine's layers has the parameters of `skyrl_mega.models.megatron`
    engine    vLLM's model for CUDA has the parameters of `skyrl_mega.models.engine`

Models are small, their structure is the real one. Ranks beyond this process come from torch's fake process group:
nothing is sent and nothing is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformer_engine.pytorch": "transformer-engine",
    "transformer_engine_torch": "transformer-engine-torch",
    "megatron.core": "megatron-core",
    "megatron.core.extensions.transformer_engine": "megatron-core",
    "vllm": "vllm",
    "vllm.model_executor.models.qwen3_moe": "vllm",
    "vllm.v1.worker.gpu_worker": "vllm",
    "flashinfer": "flashinfer-python",
    "fla.modules.causal_conv1d": "fla-core",
    "fla.ops.gated_delta_rule": "fla-core",
    "ray": "ray",
    "pynvml": "nvidia-ml-py",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "tensorboard": "tensorboard",
    "fastapi": "fastapi",
    "faiss": "faiss-cpu",
    "math_verify": "math-verify",
    "skyrl_mega": "skyrl-mega",
}
"""Module → the distribution that it is of."""

QWEN = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN
    | MOE
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3": QWEN | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen2": QWEN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "llama": QWEN | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}
LAYOUTS: list[tuple[str, int, dict[str, int]]] = [
    ("qwen3_moe", 1, {}),
    ("qwen3_moe", 8, {"tensor": 2, "expert": 8}),
    ("qwen3_moe", 8, {"tensor": 4, "expert": 2, "expert_tensor": 4}),
    ("qwen3_moe", 8, {"tensor": 2, "pipeline": 2, "expert": 4}),
    ("qwen3_moe", 8, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}),
    ("qwen3_moe", 8, {"tensor": 2, "context": 2, "expert": 4}),
    ("qwen3_moe", 4, {"pipeline": 2, "first_stage_layers": 1, "expert": 2}),
    ("qwen3", 4, {"tensor": 2, "pipeline": 2}),
    ("qwen2", 4, {"tensor": 4}),
    ("llama", 2, {"tensor": 2}),
]
"""Model, ranks, and what `ParallelDims` takes."""
ENGINES: list[tuple[str, int, bool]] = [
    ("qwen3_moe", 1, False),
    ("qwen3_moe", 2, False),
    ("qwen3_moe", 8, False),
    ("qwen3_moe", 4, True),
    ("qwen3", 2, False),
    ("qwen2", 4, False),
    ("llama", 2, False),
]
"""Model, workers of an engine, and whether experts are dealt whole."""

Shapes = Mapping[str, tuple[int, ...]]


class Differs(Exception):
    """What was expected and what there is."""


# ---- imports -------------------------------------------------------------------------------------------------------


def imports() -> None:
    """Every package, and how many cuDNNs they have loaded."""
    failed = []
    for module, package in PACKAGES.items():
        start = time.monotonic()
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                importlib.import_module(module)
                said = importlib.metadata.version(package)
            except Exception as error:  # a package may raise anything where its libraries do not fit
                said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                failed.append(f"{module}: {said}")
        print(f"  {module:46} {said:34} {time.monotonic() - start:5.1f} s")
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = sorted({line.split()[-1] for line in maps if "/libcudnn.so" in line})
    print(f"  {'cuDNN':46} {', '.join(path.removeprefix(f'{sys.prefix}/') for path in loaded)}")
    if len(loaded) != 1 or not Path(loaded[0]).is_relative_to(sys.prefix):
        failed.append(f"{len(loaded)} cuDNNs are loaded, wanted is the one of {sys.prefix}: {', '.join(loaded)}")
    if failed:
        raise Differs("\n".join(failed))


# ---- policy --------------------------------------------------------------------------------------------------------


def policy() -> None:
    """Every rank's parameters, and that the linear layers are Transformer Engine's."""
    import torch

    # Its linear layers ask for a device when they are built; what it has is asked for kernels only.
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = (lambda: True), (lambda: 1)
    cuda.get_device_capability = lambda *_: (9, 0)
    from skyrl_mega.megatron import cpu
    from skyrl_mega.models.megatron import require_transformer_engine
    from skyrl_mega.models.registry import architecture
    from skyrl_mega.parallel.dims import ParallelDims

    require_transformer_engine()  # what is not there yet, the stand-in keeps from being imported
    cpu.stand_in()
    logging.disable(logging.WARNING)  # megatron-core's, that the random state it reads is a CPU's
    for name, ranks, sizes in LAYOUTS:
        hf = MODELS[name]
        parallel = ParallelDims(ranks=ranks, **sizes)
        start, counts = time.monotonic(), set()
        for rank in range(ranks):
            kinds, found = _megatron(hf, parallel, rank)
            expected = architecture(hf).megatron_shard(hf, parallel, rank, "te").params
            compare(f"{name} {sizes}, rank {rank}", expected, found)
            if not kinds <= TE_LAYERS:
                raise Differs(f"{name} {sizes}, rank {rank}: layers {sorted(kinds - TE_LAYERS)}")
            counts.add(len(found))
        shown = " ".join(f"{key}={value}" for key, value in sizes.items()) or "one rank"
        print(row(name, shown, ranks, counts, start))


TE_LAYERS = {
    "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear", "TEDotProductAttention", "TENorm", "RMSNorm",
}  # fmt: skip
"""Classes of Transformer Engine's spec that hold parameters or attend."""


def _megatron(hf: dict[str, Any], parallel: Any, rank: int) -> tuple[set[str], Shapes]:
    """The kinds of a rank's layers, and its parameters as `models.megatron` names them."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from skyrl_mega.config.schema import PolicyConfig
    from skyrl_mega.megatron import model as build

    device = torch.device("cpu")
    with faked_groups(), mock.patch.object(build, "layer_spec", return_value="te"):
        build.join(rank, parallel, dist.HashStore(), device, 60.0)
        chunks = build.build_model(hf, PolicyConfig(), parallel, torch.bfloat16, device)
    found = {f"{i}.{name}": tuple(p.shape) for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
    kinds = {
        type(module).__name__
        for chunk in chunks
        for name, module in chunk.named_modules()
        if name.rpartition(".")[2] in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "core_attention")
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return kinds, found


# ---- engine --------------------------------------------------------------------------------------------------------


def engine() -> None:
    """Every worker's parameters of vLLM's model classes, as its CUDA platform builds them."""
    from skyrl_mega.models.registry import architecture

    platform = _hopper()
    print(f"  platform {type(platform).__name__}, compute capability {platform.get_device_capability()}")
    for name, tensor, expert_parallel in ENGINES:
        hf = MODELS[name]
        start, counts = time.monotonic(), set()
        for rank in range(tensor):
            found = _vllm(hf, tensor, rank, expert_parallel)
            expected = architecture(hf).engine_shard(hf, tensor, rank, expert_parallel).params
            compare(f"{name}, {tensor} workers, worker {rank}", expected, found)
            counts.add(len(found))
        print(row(name, f"tensor={tensor}{' expert_parallel' if expert_parallel else ''}", tensor, counts, start))


def _hopper() -> Any:
    """vLLM's CUDA platform, which answers as on a Hopper GPU where it would ask the driver."""
    import torch

    _driver()
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.is_available, cuda.device_count, cuda.current_device = (lambda: True), (lambda: 8), (lambda: 0)
    platforms: Any = vllm.platforms
    platforms._current_platform = Hopper()
    return platforms._current_platform


def _driver() -> None:
    """vLLM's kernels are linked against the driver's library. Where there is none they get one whose functions fail."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, Path(package.origin).parent.glob("*.so"))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines() if re.search(r" U cu[A-Z][A-Za-z0-9_]*$", line)}
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
        source.write_text("\n".join(f"int {name}(void) {{ return 34; }}" for name in sorted(names)))  # a stub's error
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _vllm(hf: dict[str, Any], tensor: int, rank: int, expert_parallel: bool) -> Shapes:
    """A worker's parameters at load time."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            tensor_parallel_size=tensor,
            enable_expert_parallel=expert_parallel,
            enforce_eager=True,
            load_format="dummy",
            distributed_executor_backend="mp" if tensor > 1 else None,
        ).create_engine_config()
    with set_current_vllm_config(config), _workers(tensor, rank), torch.device("cpu"):
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(dtype)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@contextlib.contextmanager
def _workers(tensor: int, rank: int) -> Iterator[None]:
    """vLLM's groups over torch's fake process group, without what sends between GPUs and processes."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    with faked_groups(), mock.patch.object(MessageQueue, "create_from_process_group", return_value=None):
        with mock.patch.object(parallel_state, "_node_count", return_value=1):
            parallel_state.init_distributed_environment(tensor, rank, "fake://", 0, "nccl")
            parallel_state.initialize_model_parallel(tensor)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state._WORLD = None
            dist.destroy_process_group()


@contextlib.contextmanager
def faked_groups() -> Iterator[None]:
    """Whatever process group is asked for is torch's fake one: of any size, and nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, new = dist.init_process_group, dist.new_group

    def fake_init(*_: Any, rank: int, world_size: int, **__: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)
        sys.excepthook = sys.__excepthook__  # torch's would put the rank before every line, once for each group

    def fake_new(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    with mock.patch.object(dist, "init_process_group", fake_init), mock.patch.object(dist, "new_group", fake_new):
        yield


# ---- all -----------------------------------------------------------------------------------------------------------


def compare(what: str, expected: Shapes, found: Shapes) -> None:
    """Raises Differs where names or shapes are not the same."""
    lines = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in found]
    lines += [f"unknown: {name} {shape}" for name, shape in found.items() if name not in expected]
    both = expected.keys() & found.keys()
    lines += [f"{n}: {found[n]}, expected {expected[n]}" for n in sorted(both) if tuple(found[n]) != tuple(expected[n])]
    if lines:
        more = [f"… and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise Differs("\n".join([f"{what}:", *lines[:8], *more]))


def row(model: str, layout: str, ranks: int, counts: set[int], start: float) -> str:
    """One line of a table."""
    many = f"{min(counts)}-{max(counts)}" if len(counts) > 1 else str(min(counts))
    where = f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    return f"  {model:10} {layout:46} {where:8} {many:>6} parameters, the same {time.monotonic() - start:5.1f} s"


PARTS = {"imports": imports, "policy": policy, "engine": engine}


def main() -> int:
    """All parts, or the one that is named."""
    if len(sys.argv) > 1:
        try:
            PARTS[sys.argv[1]]()
        except Differs as differs:
            print(f"differs: {differs}", file=sys.stderr)
            return 1
        return 0
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    failed = []
    for name in PARTS:
        print(name, flush=True)
        start = time.monotonic()
        done = subprocess.run([sys.executable, __file__, name], env=os.environ | quiet | offline, check=False)
        print(f"  {'failed' if done.returncode else 'ok'} after {time.monotonic() - start:.0f} s\n", flush=True)
        failed += [name] if done.returncode else []
    print(f"not as expected: {', '.join(failed)}" if failed else "all as expected")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
