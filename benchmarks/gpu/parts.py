"""Builders of the product's objects for all proofs: a changed interface is adapted here."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.config import allocator
from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.models import tiny
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims

if TYPE_CHECKING:
    from skyrl_mega.megatron.worker import ModelWorker
    from skyrl_mega.trajectories.sequences import Sequences
    from skyrl_mega.weights.connection import Connection

TIMEOUT_S = 60.0

# ---- models ----------------------------------------------------------------------------------------------------------


def slice_of_30b(*, tiny_size: bool, layers: int = 48) -> tuple[dict[str, Any], ParallelDims]:
    """Returns a model with the size of a rank's part of Qwen3-30B-A3B at TP2 EP8, and a layout with the optimizer in
    four shards.

    The model has half the heads, half the vocabulary and 16 of 128 experts; a token goes to 4 of them. So many token
    copies reach the experts as when two tensor ranks send theirs to 16 of 128 experts at 8 a token.
    """
    hf = known("Qwen/Qwen3-30B-A3B")
    hf |= {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 2}
    hf |= {"num_experts": 16, "num_experts_per_tok": 4, "vocab_size": hf["vocab_size"] // 2}
    if tiny_size:
        hf |= {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 512}
        hf |= {"moe_intermediate_size": 32, "intermediate_size": 64}
    return hf, ParallelDims(ranks=4)


def worker_of_30b(*, tiny_size: bool) -> dict[str, Any]:
    """Returns a model with the size and number of parts of a TP8 engine worker's shard of Qwen3-30B-A3B."""
    hf = known("Qwen/Qwen3-30B-A3B")
    hf |= {"num_attention_heads": 4, "num_key_value_heads": 1, "moe_intermediate_size": 96}
    hf |= {"vocab_size": hf["vocab_size"] // 8}
    if tiny_size:
        hf |= {"num_hidden_layers": 2, "hidden_size": 64, "num_experts": 8, "vocab_size": 512}
        hf |= {"moe_intermediate_size": 16, "intermediate_size": 64, "head_dim": 16}
    return hf


def tiny_model(path: Path, seed: int = 0, **sizes: Any) -> dict[str, Any]:
    """Writes a tiny Qwen3-MoE to disk, with weights large enough for uneven distributions; returns the config.json."""
    from safetensors.torch import load_file, save_file

    tiny.build(BuildConfig(architecture="qwen3_moe", **sizes), path, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = load_file(path / "model.safetensors")
    for t in tensors.values():
        if t.dim() == 1:
            t += torch.randn(t.shape, generator=generator) * 0.3
        else:
            t *= 6.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    hf: dict[str, Any] = json.loads((path / "config.json").read_text())
    return hf


def random_files(path: Path, hf: dict[str, Any]) -> None:
    """Writes a Hugging Face directory of a model of any size: bfloat16, matrices with standard deviation 0.02, norms
    1."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("norm.weight")
        else (0.02 * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in architecture(hf).disk_tensors(hf).items()
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(hf))


def described(hf: dict[str, Any]) -> Decoder:
    """Returns the sizes read by the sizing code."""
    return architecture(hf).describe(hf)


def rows(lengths: Sequence[int], vocab: int, seed: int = 0) -> Sequences:
    """Returns random sequences with token weights that sum to 1."""
    from skyrl_mega.trajectories.sequences import Sequences

    rng = np.random.default_rng(seed)
    batch = Sequences.of([rng.integers(0, vocab, n) for n in lengths])
    weights = torch.ones(len(batch.tokens))
    weights[batch.starts] = 0
    batch["weights"] = weights / weights.sum()
    return batch


# ---- a policy rank ---------------------------------------------------------------------------------------------------


def policy_config(spec: str = "local", **changes: Any) -> PolicyConfig:
    """Returns the policy's settings."""
    return PolicyConfig(**{"optimizer": OptimizerConfig(lr=1e-4), "spec": spec, **changes})


def open_rank(
    hf: dict[str, Any],
    parallel: ParallelDims,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    policy: PolicyConfig | None = None,
    fusions: dict[str, Any] | None = None,
) -> ModelWorker:
    """Opens rank 0 of the layout. All further ranks are simulated: messages are dropped.

    Args:
        fusions: Fields of Megatron's configuration without a setting in the product.
    """
    if device.type == "cpu":
        from skyrl_mega.megatron import cpu

        cpu.stand_in()
    else:
        os.environ.update(allocator.variables(os.environ))  # as in the policy's actors
        torch.cuda.set_device(device)
    from skyrl_mega.megatron import model
    from skyrl_mega.megatron.worker import ModelWorker

    policy = policy or policy_config()
    if dist.is_initialized():
        pass  # a second model of this process uses the same groups
    elif parallel.ranks == 1:
        store = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
        model.join(0, parallel, store, device, TIMEOUT_S)
    else:
        _pretend(parallel)
    if parallel.ranks > 1:
        policy = replace(policy, overlap=False)  # simulated messages take no time, so no overlap can be measured
    real: Any = model.TransformerConfig
    model.TransformerConfig = lambda **given: real(**{**given, **(fusions or {})})
    try:
        return ModelWorker(hf, policy, parallel, dtype=dtype, device=device)
    finally:
        model.TransformerConfig = real


def _pretend(parallel: ParallelDims) -> None:
    """Creates Megatron's groups over torch's fake backend: messages complete at once and carry no data.

    This suffices for data parallelism only: every rank holds the whole model and a shard of the optimizer.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if parallel.data != parallel.ranks:
        raise ValueError("only data-parallel ranks can be pretended: other messages are waited for")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=parallel.ranks)
    real = dist.new_group

    def fake(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "fake", "pg_options": None})

    torch.distributed.new_group = fake
    try:
        parallel_state.initialize_model_parallel()
    finally:
        torch.distributed.new_group = real
    model_parallel_cuda_manual_seed(0)


def allocate_moments(rank: ModelWorker) -> None:
    """Allocates Adam's moments now instead of in the next step."""
    from skyrl_mega.megatron import moments

    assert rank.optimizer is not None
    moments.allocate_moments(rank.optimizer)


def forget_moments(rank: ModelWorker) -> None:
    """Drops Adam's moments; the next step creates new moments."""
    for inner in _optimizers(rank):
        inner.state.clear()


def held_bytes(rank: ModelWorker) -> tuple[int, int, int]:
    """Returns the bytes of weights, gradients and optimizer state, after a first step."""
    parameters: list[Any] = list(rank.params.values())
    state: list[Tensor] = []
    for inner in _optimizers(rank):
        for group in inner.param_groups:
            state += group["params"]
        for entry in inner.state.values():
            state += [value for name, value in entry.items() if name != "step"]
    weights = _storages(parameters)
    gradients = _storages([p.main_grad for p in parameters if p.requires_grad])
    optimizer = {at: size for at, size in _storages(state).items() if at not in weights}
    return sum(weights.values()), sum(gradients.values()), sum(optimizer.values())


def _optimizers(rank: ModelWorker) -> list[torch.optim.Optimizer]:
    """Returns the Adam optimizers inside Megatron's optimizer."""
    from skyrl_mega.megatron import moments

    assert rank.optimizer is not None
    return [part.optimizer for part in moments.inner_optimizers(rank.optimizer)]


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def give_reference(rank: ModelWorker) -> None:
    """Keeps the present weights as the reference in the form of `keep_reference`, without reading a file."""
    from skyrl_mega.megatron import worker as module

    copies = {name: tensor.to("cpu", copy=True) for name, tensor in rank.weights().items()}

    def copied(_: Path, __: Any, params: dict[str, Tensor], optional: Any = None) -> None:
        for name, tensor in params.items():
            tensor.copy_(copies[name])

    files: Any = module.files
    real = files.load
    files.load = copied
    try:
        rank.keep_reference(Path("no file is read"))
    finally:
        files.load = real


# ---- a weight sync ---------------------------------------------------------------------------------------------------


def connection(
    hf: dict[str, Any],
    port: int,
    group_name: str,
    *,
    bucket_bytes: int,
    timeout_s: float,
    plans: Path,
    dtype: str = "bfloat16",
    fp8: bool = False,
) -> Connection:
    """Returns the connection of a policy rank and an engine worker on the same device."""
    from skyrl_mega.models.blocks.base import EngineCut
    from skyrl_mega.weights.connection import Connection
    from skyrl_mega.weights.plan.topology import Links, Topology

    return Connection(
        host="127.0.0.1",
        port=port,
        group_name=group_name,
        inputs=dict(
            hf=hf,
            parallel=asdict(ParallelDims()),
            spec="local",
            engines=asdict(EngineCut(1)),
            members=(0,),
            topology=asdict(Topology((0,), (0,), Links(1, 1))),
            dtype=dtype,
            fp8=fp8,
        ),
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        plans=str(plans),
    )


def free_port() -> int:
    """Returns a loopback port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
