"""The architectures by `model_type`, with the interface used by other packages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from skyrl_mega.common.errors import UserError
from skyrl_mega.models import engine, families, huggingface, megatron
from skyrl_mega.models.blocks.base import EngineCut, MegatronSettings, Spec
from skyrl_mega.models.blocks.embedding import padded_vocab
from skyrl_mega.models.config_json import Hf
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.disk_form import disk_shapes
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.parallel.dims import ParallelDims


@dataclass(frozen=True)
class Architecture:
    """A `model_type`: tensors on disk, in Megatron and in vLLM. No method needs a process group.

    Every method takes the content of config.json and raises UserError for unsupported values.
    """

    name: str
    """`model_type` in config.json."""
    describe: Callable[[Hf], Decoder]
    """Reads the model's sizes and parts."""
    transformers_class: str
    """Name of the transformers class, by which vLLM selects the model."""
    small: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Translates a config.json with common keys, for a small model with random weights, to the keys of this family;
    None for families without experts, which use the common keys."""
    in_files: Callable[[Hf, Collection[str]], Hf] | None = None
    """Adds to config.json, for `describe`, the form of the files from the names of their tensors; None for families
    with a single form."""

    def tensors(self, hf: Hf) -> dict[str, tuple[int, ...]]:
        """Returns name → shape of every tensor of the model, in a new dict, with the axes in the order of the engines.

        Positions within a tensor (`parallel.box`) refer to these shapes. Files may have the axes in another order
        (`disk_tensors`), and may contain scales of quantised tensors, which are left out here.

        Raises:
            UserError: config.json is not supported.
        """
        return huggingface.tensors(self.describe(hf))

    def disk_tensors(self, hf: Hf) -> dict[str, tuple[int, ...]]:
        """Returns name → shape in safetensors files of every tensor of a checkpoint without quantisation, in a new
        dict.

        Raises:
            UserError: config.json is not supported.
        """
        decoder = self.describe(hf)
        return disk_shapes(huggingface.tensors(decoder), decoder.disk_forms)

    def megatron_settings(self, hf: Hf) -> MegatronSettings:
        """Returns the keyword arguments of megatron-core's TransformerConfig and GPTModel.

        Raises:
            UserError: config.json is not supported, or layers need different values of an argument for all layers.
        """
        return megatron.settings(self.describe(hf))

    def padded_vocab(self, hf: Hf, tensor: int) -> int:
        """Returns the rows of Megatron's embedding over all tensor-parallel ranks: the number of tokens, rounded up to
        a multiple of `tensor`, the tensor-parallel size.

        Raises:
            UserError: config.json is not supported.
        """
        return padded_vocab(self.describe(hf).vocab, tensor)

    def check_layout(self, hf: Hf, parallel: ParallelDims, key: str = "policy.layout") -> None:
        """Raises an error unless a policy layout divides the model and trains correctly.

        Args:
            hf: Content of config.json.
            parallel: The layout.
            key: The layout's setting, for errors.

        Raises:
            UserError: Names the setting under `key`, the value and the allowed values. Or config.json is not supported.
        """
        megatron.check(self.describe(hf), parallel, key)

    def check_engine(
        self, hf: Hf, tensor: int, expert_parallel: bool = False, key: str = "rollout.tensor", data: int = 1
    ) -> None:
        """Raises an error unless vLLM can split the model into engines of this size.

        Args:
            hf: Content of config.json.
            tensor: Tensor parallelism.
            expert_parallel: True if whole experts are distributed over the workers.
            key: The setting, for errors.
            data: Data-parallel replicas inside the engine.

        Raises:
            UserError: Names `key`, the value and the allowed values. Or config.json is not supported.
        """
        engine.check(self.describe(hf), EngineCut(tensor, expert_parallel, data), key)

    def megatron_shard(self, hf: Hf, parallel: ParallelDims, rank: int, spec: Spec) -> Shard:
        """Returns the parameters of policy rank `rank` and the pieces to fill them; names as in `megatron.shard`.

        Args:
            hf: Content of config.json.
            parallel: The policy's layout.
            rank: The policy rank, from 0.
            spec: Kind of the layers, "te" or "local", which decides names (`models.megatron.layer_spec`).

        Raises:
            UserError: The layout does not divide the model, or config.json is not supported.
            ValueError: `rank` is not a rank of the layout.
        """
        self.check_layout(hf, parallel)
        return megatron.shard(self.describe(hf), parallel, rank, spec)

    def megatron_layout(self, hf: Hf, parallel: ParallelDims, spec: Spec) -> Layout:
        """Returns the shards of all policy ranks, in order. Ranks with the same parameters share one `Shard` object.

        Args:
            hf: Content of config.json.
            parallel: The policy's layout.
            spec: Kind of the layers, "te" or "local" (`models.megatron.layer_spec`).

        Raises:
            UserError: The layout does not divide the model, or config.json is not supported.
        """
        self.check_layout(hf, parallel)
        decoder, tensors = self.describe(hf), self.tensors(hf)
        coordinates = [parallel.coordinates(rank) for rank in range(parallel.ranks)]
        distinct = {(at.tp, at.pp, at.ep, at.etp): rank for rank, at in reversed(list(enumerate(coordinates)))}
        shards = {key: megatron.shard(decoder, parallel, rank, spec, tensors) for key, rank in distinct.items()}
        return Layout(tensors, tuple(shards[at.tp, at.pp, at.ep, at.etp] for at in coordinates))

    def engine_shard(self, hf: Hf, tensor: int, rank: int, expert_parallel: bool = False, data: int = 1) -> Shard:
        """Returns the parameters of worker `rank` (0 … `tensor` · `data` - 1) of an engine, named as in vLLM at load
        time, and the pieces to fill them.

        Args:
            hf: Content of config.json.
            tensor: Tensor parallelism.
            rank: Number of the worker in its engine.
            expert_parallel: True if whole experts are distributed over the workers.
            data: Data-parallel replicas inside the engine.

        Raises:
            UserError: vLLM cannot split the model so, or config.json is not supported.
        """
        self.check_engine(hf, tensor, expert_parallel, data=data)
        return engine.shard(self.describe(hf), EngineCut(tensor, expert_parallel, data), rank)

    def engine_layout(
        self, hf: Hf, tensor: int, engines: int = 1, expert_parallel: bool = False, data: int = 1
    ) -> Layout:
        """Returns the shards of the workers of all engines; worker `rank` of engine `e` is entry `e · data · tensor +
        rank`.

        Workers with the same `rank` share one `Shard` object.

        Args:
            hf: Content of config.json.
            tensor: Tensor parallelism.
            engines: Number of engines.
            expert_parallel: True if whole experts are distributed over the workers.
            data: Data-parallel replicas inside an engine.

        Raises:
            UserError: vLLM cannot split the model so, or config.json is not supported.
        """
        self.check_engine(hf, tensor, expert_parallel, data=data)
        decoder, tensors = self.describe(hf), self.tensors(hf)
        cut = EngineCut(tensor, expert_parallel, data)
        shards = tuple(engine.shard(decoder, cut, rank, tensors) for rank in range(cut.workers))
        return Layout(tensors, shards * engines)


def _families() -> dict[str, Architecture]:
    """Returns an architecture per file in `families/`, named after its `model_type`; newest first."""
    names = sorted((module.name for module in iter_modules(families.__path__)), reverse=True)
    modules = {name: import_module(f"{families.__name__}.{name}") for name in names}
    optional = {name: (getattr(m, "small", None), getattr(m, "in_files", None)) for name, m in modules.items()}
    return {name: Architecture(name, m.describe, m.CLASS, *optional[name]) for name, m in modules.items()}


HeadKind = Literal["vocab", "value"]
"""The module on the last hidden states: the output projection, or a critic's value head."""
ARCHITECTURES = _families()


def architecture(hf: Hf, head: HeadKind = "vocab") -> Architecture:
    """Returns the architecture of a config.json, by `model_type`.

    Args:
        hf: The content of config.json.
        head: "vocab": the model itself. "value": the returned architecture describes a critic (`Decoder.critic`).

    Raises:
        UserError: The type is missing or not supported. The other keys are not read here.
    """
    arch = ARCHITECTURES.get(str(hf.get("model_type", "")))
    if arch is None:
        raise UserError(
            f"model_type is {hf.get('model_type')!r}; supported are {', '.join(sorted(ARCHITECTURES))}; "
            "choose a model of one of these, or add a family (docs/new-architecture.md)",
            key="config.json",
        )
    return arch if head == "vocab" else replace(arch, describe=lambda hf: arch.describe(hf).critic)
