"""The publishing of a policy rank: the chunks owned by the rank, in full or as changes, in one object.

The plan of a sync to a single engine decides owners and chunks: each box that an engine worker wants has one sender,
cut at the edges of both layouts, so nothing is written twice and a worker of this layout reads whole chunks. Packing
and FP8 are the weight sync's own code. A publisher keeps the bytes of the previous publication in host memory, for the
changes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.weights.exchange.rank_program import Item, RankBucket, Role, rank_program
from skyrl_mega.weights.exchange.tensors import BucketViewCache
from skyrl_mega.weights.files.coding import Bytes, Encoded, encode
from skyrl_mega.weights.files.manifest import (
    MAGIC,
    Chunk,
    PayloadIndex,
    StoredFile,
    compressed,
    layout_data,
    layout_key,
)
from skyrl_mega.weights.files.store import Store, StoreError, open_store
from skyrl_mega.weights.fp8.scales import Agree, Scales
from skyrl_mega.weights.plan.cache import cached_plan
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs
from skyrl_mega.weights.plan.topology import Links, Topology

CHUNK_BYTES = 4 << 20
"""Largest size of a chunk (at least one row)."""
BUCKET_BYTES = 64 << 20
"""Bytes packed at a time, on the policy's device."""
THREADS = 4
"""Threads of a rank that compare and compress chunks."""
ATTEMPTS = 3
"""Attempts to write a rank's objects."""


@dataclass(frozen=True)
class Publication:
    """Settings of a publisher, the same on all policy ranks. Plain values only, as in JSON."""

    inputs: dict[str, Any]
    """Fields of `SyncInputs`, from `file_inputs`."""
    plans: str
    """Folder of cached plans."""
    folder: str
    """Address of the store."""
    publisher: str
    """Name of the publisher: 16 hexadecimal digits."""
    keep: bool
    """True to keep the published bytes in host memory, for changes."""


@dataclass(frozen=True)
class PublishReport:
    """The objects that a policy rank wrote for a publication, with the numbers of bytes, elements and seconds."""

    file: StoredFile
    layout: StoredFile
    plain_bytes: int
    """Bytes of the rank's chunks."""
    elements: int
    """Elements of the rank's chunks."""
    changed: int
    """Elements that differ from the base; all for a full image."""
    seconds: float
    """Seconds from packing the first byte to the object in the store."""


class _Part(NamedTuple):
    """A packed chunk."""

    data: Bytes
    """Bytes in host memory."""
    itemsize: int
    """Bytes of an element."""
    place: int
    """First byte among the kept bytes."""


def file_inputs(inputs: SyncInputs) -> SyncInputs:
    """Returns the inputs of the plan of a publication: one engine in a node of its own, so that each box has a single
    owner, and owners take equal shares."""
    ranks, workers = inputs.ranks, inputs.workers
    devices = max(ranks, workers)
    links = Links(gpus_per_node=devices, nics_per_node=devices)
    topology = Topology(tuple(range(ranks)), tuple(range(devices, devices + workers)), links)
    return replace(
        inputs,
        members=(0,),
        topology=asdict(topology),
    )


def file_plan(inputs: SyncInputs) -> Plan:
    """Returns the plan of a publication, from the policy to one engine, in parts of at most `CHUNK_BYTES`.

    Args:
        inputs: Result of `file_inputs`.

    Raises:
        UserError: The model cannot be split into a layout.
    """
    ends, wire = inputs.endpoints()
    return plan(ends.policy, ends.engines, ends.topology, wire.itemsize, slab_bytes=CHUNK_BYTES)


class Publisher:
    """A policy rank's part of all publications of a publisher.

    Args:
        publication: Settings, the same on all ranks.
        rank: This policy rank.
        device: Device of the rank's parameters.
        agree: Maximum over ranks, for an FP8 wire; see `fp8.scales.Agree`.

    Raises:
        UserError: The model cannot be split into a layout, or fsspec lacks a package.
    """

    def __init__(self, publication: Publication, rank: int, device: torch.device, agree: Agree | None = None) -> None:
        self.publication, self.rank, self.device = publication, rank, device
        self.store: Store = open_store(publication.folder)
        inputs = SyncInputs(**publication.inputs)
        ends, wire = inputs.endpoints()
        transfers = cached_plan(
            Path(publication.plans), ["files", CHUNK_BYTES, publication.inputs], lambda: file_plan(inputs)
        )
        steps, _ = rank_program(
            transfers,
            wire,
            Role(rank, ends.policy.shards[rank], None),
            bucket_bytes=BUCKET_BYTES,
            in_flight=2,
            target_base=transfers.sources,
            owners={process: process for process in range(transfers.sources + transfers.targets)},
        )
        self._shard = ends.policy.shards[rank]
        self._buckets: list[RankBucket] = [step.send for step in steps if step.send is not None and step.send.packed]
        self._items: list[Item] = [item for bucket in self._buckets for item in bucket.items]
        self.chunks = [Chunk(item.tensor, item.box, item.dtype) for item in self._items]
        """The chunks owned by this rank."""
        self._scales: Scales | None = None
        if wire.quantised:
            sent = {item.tensor for item in self._items}
            self._scales = Scales(ends.policy, rank, wire.quantised, sent, agree, device)
        self._views = BucketViewCache(True, torch.empty(0, device=device).device)
        self._layout: StoredFile | None = None
        nbytes = sum(chunk.nbytes for chunk in self.chunks) if publication.keep else 0
        self._kept: Bytes = np.zeros(nbytes, np.uint8)
        """Bytes of the chunks as published last."""
        self._base = ""

    @torch.no_grad()
    def publish(self, params: Mapping[str, Tensor], name: str, base: str) -> PublishReport:
        """Writes this rank's object of a publication, and before a full image the rank's layout, and returns a report.
        A collective of all ranks with an FP8 wire.

        A rank that has not kept the bytes of `base`, or fails to write changes, writes all of its chunks in full; the
        forms of the chunks say so, and a reader takes either.

        Args:
            params: This rank's parameters by local name.
            name: Name of the publication (`manifest.publication`).
            base: Name of the publication that readers have; "" for a full image.

        Raises:
            StoreError: The store failed `ATTEMPTS` times.
            KeyError: `params` lacks a parameter.
        """
        if self._scales is not None:
            self._scales.compute(params)
        for attempt in range(1, ATTEMPTS + 1):
            relative, self._base = bool(base) and base == self._base, ""
            try:
                if self._layout is None or not base:
                    data, layout = layout_data(self.chunks)
                    self.store.write(layout_key(self.publication.publisher, self.rank), data)
                    self._layout = layout
                report = self._write(params, f"{name}/rank-{self.rank:05d}", relative)
            except StoreError:
                if attempt == ATTEMPTS:
                    raise
                time.sleep(attempt)
                continue
            self._base = name if self.publication.keep else ""
            return report
        raise AssertionError("the last attempt returns or raises")

    def _write(self, params: Mapping[str, Tensor], key: str, relative: bool) -> PublishReport:
        start = time.perf_counter()
        index, changed, layout = PayloadIndex([], [], [], []), 0, self._layout
        assert layout is not None
        with self.store.writing(key) as file, ThreadPoolExecutor(THREADS, "publish") as pool:
            file.write(MAGIC)
            for data in self._packed(params):
                for encoded, plain in pool.map(lambda part: self._encoded(part, relative), data):
                    file.write(encoded.payload)
                    changed += encoded.changed
                    index.forms.append(encoded.form)
                    index.sizes.append(len(encoded.payload))
                    index.stored.append(zlib.crc32(encoded.payload))
                    index.plain.append(plain)
            stored = _finish(file, index)
        return PublishReport(
            stored,
            layout,
            plain_bytes=sum(chunk.nbytes for chunk in self.chunks),
            elements=sum(chunk.box.numel for chunk in self.chunks),
            changed=changed,
            seconds=time.perf_counter() - start,
        )

    def _packed(self, params: Mapping[str, Tensor]) -> Iterator[list[_Part]]:
        """Yields the chunks of each bucket."""
        tables = self._scales.tables if self._scales is not None else {}
        flat = torch.empty(
            max((bucket.nbytes for bucket in self._buckets), default=0), dtype=torch.uint8, device=self.device
        )
        place = 0
        for bucket in self._buckets:
            views, tensors = self._views.of(
                bucket, lambda name: tables[name] if name in tables else self._shard.shaped(name, params[name])
            )
            views.pack(tensors, flat)
            views.quantise(tensors, flat)
            host = flat[: bucket.nbytes].cpu().numpy()
            parts = []
            for item in bucket.items:
                size = item.box.numel * item.dtype.itemsize
                parts.append(_Part(host[item.offset : item.offset + size], item.dtype.itemsize, place))
                place += size
            yield parts

    def _encoded(self, part: _Part, relative: bool) -> tuple[Encoded, int]:
        """Returns a chunk's stored form and the CRC-32 of its bytes, and keeps the bytes."""
        kept = self._kept[part.place : part.place + len(part.data)] if self.publication.keep else None
        encoded = encode(part.data, kept if relative else None, part.itemsize)
        if kept is not None:
            kept[:] = part.data
        return encoded, zlib.crc32(part.data.data)


def _finish(file: BinaryIO, index: PayloadIndex) -> StoredFile:
    """Writes the index at the end of a rank's file."""
    table, begin = compressed(index.__dict__), len(MAGIC) + sum(index.sizes)
    file.write(table)
    return StoredFile(begin + len(table), begin, zlib.crc32(table))
