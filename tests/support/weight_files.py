"""Policies and engine workers of weight files, all in this process, with weights that change like a run's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.cluster.run_placement import plan_placement
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.files.fetch import FetchReport, Reader
from skyrl_mega.weights.files.manifest import Manifest, publication, write_manifest
from skyrl_mega.weights.files.publish import Publication, Publisher, PublishReport, file_inputs
from skyrl_mega.weights.files.source import Source
from skyrl_mega.weights.files.store import open_store
from skyrl_mega.weights.plan.sync_plan import SyncInputs
from tests.support.shards import cut

CPU = torch.device("cpu")


def inputs_of(hf: dict[str, Any], parallel: ParallelDims, dtype: str, wire: str = "auto") -> SyncInputs:
    """Returns the inputs of a publication by a policy of this layout."""
    config = Config(model=ModelConfig(dtype=dtype), rollout=RolloutConfig(tensor=1), weights=WeightsConfig(wire=wire))
    config = cut(config, parallel)
    return file_inputs(SyncInputs.of(config, hf, plan_placement(config)))


def local(shard: Shard, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the local tensors of a shard of these weights."""
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in shard.params.items()}
    for piece in shard.pieces:
        local_view(params[piece.param], piece.offset, piece.box).copy_(weights[piece.tensor][piece.box.slices()])
    return params


class Policy:
    """All ranks of a policy, as a publisher.

    Args:
        hf: The model's config.json.
        parallel: Layout of the policy.
        dtype: Type of the model and of the files.
        folder: Address of the store.
        plans: Folder of cached plans.
        wire: Setting `weights.wire`.
    """

    def __init__(
        self, hf: dict[str, Any], parallel: ParallelDims, dtype: str, folder: str, plans: Path, wire: str = "auto"
    ) -> None:
        self.hf, self.dtype = hf, getattr(torch, dtype)
        inputs = inputs_of(hf, parallel, dtype, wire)
        self.fp8 = inputs.fp8
        self.layout = architecture(hf).megatron_layout(hf, parallel, "local")
        self.folder, self.name, self.number, self.base = folder, secrets.token_hex(8), 0, ""
        shared = Publication(asdict(inputs), str(plans), folder, self.name, keep=True)
        self.ranks = [Publisher(shared, rank, CPU) for rank in range(parallel.ranks)]

    def publish(self, weights: Mapping[str, Tensor], full: bool = False) -> str:
        """Publishes weights, with all parts and the manifest; returns the name."""
        name = self.begin(weights, full)
        self.finish()
        return name

    def begin(self, weights: Mapping[str, Tensor], full: bool = False) -> str:
        """Writes all parts of a publication without the manifest, as a writer killed in between; returns the name."""
        name = publication(self.name, self.number)
        self.number += 1
        self._written = name, "" if full else self.base
        self.reports: list[PublishReport] = [
            rank.publish(local(shard, weights, self.dtype), *self._written)
            for rank, shard in zip(self.ranks, self.layout.shards, strict=True)
        ]
        return name

    def finish(self) -> None:
        """Writes the manifest of the publication begun last."""
        name, base = self._written
        files, layouts = tuple(r.file for r in self.reports), tuple(r.layout for r in self.reports)
        write_manifest(open_store(self.folder), Manifest(name, self.number, base, self.fp8, files, layouts))
        self.base = name


class Worker:
    """An engine worker: a shard and the reader of its image."""

    def __init__(self, hf: dict[str, Any], shard: Shard, dtype: str = "float32", file: Path | None = None) -> None:
        self.shard, self.dtype, self.file = shard, getattr(torch, dtype), file
        self.reader = Reader(shard, architecture(hf).tensors(hf))

    def fetch(self, folder: str, name: str) -> FetchReport:
        """Fetches a publication."""
        return self.reader.fetch(Source(folder, name, 60.0), self.file)

    def installed(self) -> dict[str, Tensor]:
        """Returns parameters filled from the image."""
        assert self.reader.image is not None
        params = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in self.shard.params.items()}
        self.reader.image.install(params, lambda name: None)
        return params

    def has(self, weights: Mapping[str, Tensor]) -> bool:
        """Returns True if the installed parameters are these weights, bit for bit."""
        expected = local(self.shard, weights, self.dtype)
        return all(
            torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
            for name, tensor in self.installed().items()
        )


def workers(hf: dict[str, Any], tensor: int, expert_parallel: bool = False, **more: Any) -> Iterator[Worker]:
    """Yields the workers of an engine."""
    for shard in architecture(hf).engine_layout(hf, tensor, 1, expert_parallel).shards:
        yield Worker(hf, shard, **more)


def random_weights(hf: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Returns float32 weights of a model."""
    shapes = architecture(hf).tensors(hf)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def step(weights: Mapping[str, Tensor], share: float, generator: torch.Generator) -> None:
    """Changes about `share` of the elements of each tensor, in place."""
    for tensor in weights.values():
        moved = torch.rand(tensor.shape, generator=generator) < share
        tensor.add_(moved * 1e-3 * torch.randn(tensor.shape, generator=generator))
