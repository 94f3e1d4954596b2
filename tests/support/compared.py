"""vLLM workers that compare their weights: with files cut by this project's boxes, and with other workers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.engines.vllm.transfer import WorkerExtension
from skyrl_mega.hf_checkpoint.load import load
from tests.support.sleeping import GarbageAfterWake


class FileComparison(WorkerExtension):
    """The project's extension of workers, with a comparison."""

    def unlike_files(self, path: str) -> list[str]:
        """Returns the names of the load-time parameters unlike this worker's part of a Hugging Face directory; changes
        nothing."""
        engine = self.weight_transfer_engine
        parameters, shard = engine.parameters, engine.own_shard()
        parameters.open(check=True)
        load(Path(path), shard, parameters, written=parameters.mark_written)
        return list(parameters.close())


class Fingerprints(GarbageAfterWake):
    """The project's extension of workers, for comparisons of whole models between engines."""

    def fingerprints(self) -> dict[str, str]:
        """Returns type, shape and digest of every tensor of this worker's model (`tensors_of`)."""
        tensors = tensors_of(self.weight_transfer_engine.model)
        return {name: f"{t.dtype} {tuple(t.shape)} {digest(t)}" for name, t in tensors.items()}

    def second_biases(self) -> dict[str, list[list[float]]]:
        """Returns the biases of the experts' second projections, without padding, by name."""
        named = self.weight_transfer_engine.model.named_parameters()
        return {name: bias.float().tolist() for name, bias in named if name.endswith("w2_bias")}


def digest(tensor: Tensor) -> str:
    """Returns a digest of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Returns copies of all tensors of a vLLM model: parameters, buffers, attributes of modules.

    A linear layer on CPU holds its weight in a packed form that cannot be read, so its product with fixed numbers
    stands for the weight.
    """
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor) and name != "kv_cache":
                tensors[f"{prefix}.{name}"] = _without_padding(module, name, value).detach().clone()
        if (columns := _columns(module)) is not None:
            inputs = torch.randn(4, columns, generator=torch.Generator().manual_seed(0)).to(module.weight.dtype)
            product = module.cpu_linear(inputs, module.weight, None)
            tensors[f"{prefix} (product)"] = _without_padding(module, "weight", product.T).detach().clone()
    return tensors


def _columns(module: Any) -> int | None:
    """Returns the inputs of a linear layer with packed weights; None for other modules."""
    if "cpu_linear" not in vars(module):
        return None
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    return next(int(getattr(module, name)) for name in names if hasattr(module, name))


def _without_padding(module: Any, name: str, value: Tensor) -> Tensor:
    """Returns the rows of a vocabulary's weight that belong to tokens; the rest is padding with any content."""
    if name != "weight" or not hasattr(module, "shard_indices"):
        return value
    return value[: module.shard_indices.num_org_elements]
