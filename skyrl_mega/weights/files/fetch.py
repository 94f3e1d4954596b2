"""The reading end of weight files: an engine worker's image follows the publications in a store.

`Reader.fetch` reads the manifest of the wanted publication, then of its base, of the base's base, … until the
publication in the image or a full image. It reads the payloads of the shard's chunks alone, in ranges of up to
`RANGE_BYTES`, and verifies every payload and every whole chunk with a checksum. Changes are applied after all of a
publication's payloads have arrived; while the image is written it has no name, so a half-written image is never used.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from skyrl_mega.common.threads import in_threads
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.weights.files.coding import RELATIVE, SAME, WrongPayload
from skyrl_mega.weights.files.image import Image, Overlap, put
from skyrl_mega.weights.files.manifest import (
    MAGIC,
    Chunk,
    DamagedFiles,
    Manifest,
    PayloadIndex,
    read_index,
    read_layout,
    read_manifest,
)
from skyrl_mega.weights.files.source import Source
from skyrl_mega.weights.files.store import Store, StoreError, open_store
from skyrl_mega.weights.fp8.format import quantised, with_scales

RANGE_BYTES = 8 << 20
"""Largest range read at once (at least one payload): a slow link with long delays is still busy."""
GAP_BYTES = 64 << 10
"""Largest run of bytes of other workers' chunks that is read rather than skipped."""
THREADS = 8
"""Ranges read at the same time."""
LONGEST_CHAIN = 10_000
"""Most publications from a full image on."""
REREADS = 3
"""Attempts to read a range whose checksums differ."""


@dataclass
class FetchReport:
    """Bytes and seconds of a fetch."""

    read: int = 0
    """Bytes of payloads read from the store."""
    publications: int = 0
    """Publications read; 0 if the image was up to date."""
    full: bool = False
    """True if a full image was read."""
    kept: int = 0
    """Bytes of a full image that were in the cache already."""
    seconds: float = 0.0
    """Duration of the fetch."""


@dataclass(frozen=True)
class _Wanted:
    """A chunk with a part in the image."""

    rank: int
    number: int
    """Place in the rank's layout."""
    chunk: Chunk
    parts: list[Overlap]


@dataclass(frozen=True)
class _Payload:
    """A stored chunk of one publication."""

    wanted: _Wanted
    key: str
    begin: int
    size: int
    form: int
    stored: int
    plain: int


class Reader:
    """An engine worker's view of a store: an image of the worker's shard.

    Args:
        shard: The worker's shard, without scales.
        tensors: Shapes of the model's tensors by name.
    """

    def __init__(self, shard: Shard, tensors: dict[str, tuple[int, ...]]) -> None:
        self.shard, self.tensors = shard, tensors
        self.image: Image | None = None
        self._publisher = ""
        self._wanted: list[_Wanted] = []
        self._chunks: list[int] = []
        self._until = 0.0
        self._stopped = threading.Event()

    def fetch(self, source: Source, file: Path | None = None, stopped: threading.Event | None = None) -> FetchReport:
        """Brings the image to a publication and returns a report; reads nothing if the image has this publication
        already. After an error the next call resumes.

        Args:
            source: The publication.
            file: File of a new image; None keeps the image in host memory. Not used while there is an image.
            stopped: Ends the fetch at the next publication or range, with a StoreError, once it is set.

        Raises:
            StoreError: The store failed, lacks an object of the publication (`Absent`), `source.timeout_s` is over, or
                `stopped` is set.
            DamagedFiles: An object is not as written, after `REREADS` attempts, or the image's file was changed.
            Incomplete: The publication lacks a part of the shard, or has it in another type.
            UserError: `file` is in use or cannot be opened, or fsspec cannot open the store's address.
        """
        start, report = time.monotonic(), FetchReport()
        self._stopped = stopped or threading.Event()
        self._until = start + source.timeout_s
        store = open_store(source.folder)
        if self.image is None or self.image.name != source.name:
            self._check_time(source.name)
            for manifest in self._chain(store, source.name, file):
                self._read(store, manifest, report)
                report.publications += 1
        report.seconds = time.monotonic() - start
        return report

    def close(self) -> None:
        """Frees the image, and releases its file; a later `fetch` makes a new image."""
        if self.image is not None:
            self.image.close()
        self.image, self._publisher = None, ""

    def _chain(self, store: Store, name: str, file: Path | None) -> list[Manifest]:
        """Returns the publications to read, oldest first."""
        manifests: list[Manifest] = []
        while len(manifests) < LONGEST_CHAIN:
            manifest = read_manifest(store, name)
            if not manifests:
                self._prepare(store, manifest, file)
            manifests.insert(0, manifest)
            assert self.image is not None
            if not manifest.base or manifest.base == self.image.name:
                return manifests
            name = manifest.base
        raise DamagedFiles(f"{store.address}: {name}: more than {LONGEST_CHAIN} publications without a full image")

    def _prepare(self, store: Store, manifest: Manifest, file: Path | None) -> None:
        """Reads the layouts of a new publisher, and makes the image if there is none of these types."""
        if self._publisher == manifest.publisher:
            return
        layouts = [read_layout(store, manifest, rank) for rank in range(len(manifest.layouts))]
        types = {chunk.tensor: chunk.dtype for layout in layouts for chunk in layout}
        shard = self.shard
        if manifest.fp8:
            shard = with_scales(Layout(self.tensors, (shard,)), quantised(self.tensors)).shards[0]
        if self.image is not None and any(self.image.types[name] != types.get(name) for name in self.image.types):
            self.close()
        if self.image is None:
            names = {piece.tensor for piece in shard.pieces}
            self.image = Image(shard, {name: types[name] for name in names if name in types}, file)
        self._wanted = [
            _Wanted(rank, number, chunk, parts)
            for rank, layout in enumerate(layouts)
            for number, chunk in enumerate(layout)
            if (parts := self.image.overlaps(chunk))
        ]
        self.image.check_covered((wanted.chunk, wanted.parts) for wanted in self._wanted)
        if self.image.unverified and not all(part.whole for wanted in self._wanted for part in wanted.parts):
            self.image.name = ""  # no checksum tells whether the parts of chunks are as an earlier worker left them
        self._chunks, self._publisher = [len(layout) for layout in layouts], manifest.publisher

    def _read(self, store: Store, manifest: Manifest, report: FetchReport) -> None:
        """Brings the image from a publication's base, or from any content, to the publication."""
        image, payloads = self.image, self._payloads(store, manifest)
        assert image is not None
        if manifest.base:
            fetched = in_threads(lambda some: self._range(store, some), _ranges(payloads), THREADS, "fetch")
            image.name = ""
            in_threads(_put_all, fetched, THREADS, "fetch")
            if image.unverified:
                in_threads(_check_unchanged, payloads, THREADS, "fetch")
        else:
            report.full, image.name = True, ""
            if not image.fresh:
                plain = sum(payload.wanted.chunk.nbytes for payload in payloads)
                held = in_threads(_held, payloads, THREADS, "fetch")
                payloads = [p for p, is_held in zip(payloads, held, strict=True) if not is_held]
                report.kept += plain - sum(payload.wanted.chunk.nbytes for payload in payloads)
            image.fresh = False
            in_threads(lambda some: _put_all(self._range(store, some)), _ranges(payloads), THREADS, "fetch")
        image.name, image.unverified = manifest.name, False
        report.read += sum(payload.size for payload in payloads)

    def _payloads(self, store: Store, manifest: Manifest) -> list[_Payload]:
        """Returns the payloads of the wanted chunks."""
        ranks = sorted({wanted.rank for wanted in self._wanted})
        if len(self._chunks) != len(manifest.files):
            raise DamagedFiles(f"{store.address}: {manifest.name}: it has files of {len(manifest.files)} ranks")
        read = in_threads(lambda rank: read_index(store, manifest, rank, self._chunks[rank]), ranks, THREADS, "fetch")
        indices: dict[int, PayloadIndex] = dict(zip(ranks, read, strict=True))
        begins = {rank: list(accumulate(index.sizes, initial=len(MAGIC))) for rank, index in indices.items()}
        payloads = []
        for wanted in self._wanted:
            index, at = indices[wanted.rank], wanted.number
            key, form = manifest.file(wanted.rank), index.forms[at]
            if not manifest.base and form in RELATIVE:
                raise DamagedFiles(f"{store.address}: {key}: changes in a full image")
            payloads.append(
                _Payload(
                    wanted,
                    key,
                    begin=begins[wanted.rank][at],
                    size=index.sizes[at],
                    form=form,
                    stored=index.stored[at],
                    plain=index.plain[at],
                )
            )
        return payloads

    def _check_time(self, what: str) -> None:
        """Raises a StoreError if the fetch was stopped, or its time is over."""
        if self._stopped.is_set():
            raise StoreError(f"{what}: another fetch began")
        if time.monotonic() > self._until:
            raise StoreError(f"{what}: not read within weights.timeout_s")

    def _range(self, store: Store, payloads: Sequence[_Payload]) -> list[tuple[_Payload, memoryview]]:
        """Reads adjacent payloads of a file, again if a checksum differs.

        Raises:
            StoreError: The store failed, or the time is over.
            DamagedFiles: A checksum differs, after `REREADS` attempts.
        """
        first, last = payloads[0], payloads[-1]
        for _ in range(REREADS):
            self._check_time(f"{store.address}: {first.key}")
            data = memoryview(store.read(first.key, first.begin, last.begin + last.size - first.begin))
            found = [(p, data[p.begin - first.begin : p.begin - first.begin + p.size]) for p in payloads]
            if all(zlib.crc32(part) == payload.stored for payload, part in found):
                return found
        raise DamagedFiles(f"{store.address}: {first.key}: its bytes from {first.begin} on are not as written")


def _held(payload: _Payload) -> bool:
    """Returns True if the image holds a chunk already, as after the end of an earlier worker."""
    return all(part.whole and part.crc() == payload.plain for part in payload.wanted.parts)


def _check_unchanged(payload: _Payload) -> None:
    """Raises DamagedFiles if the image does not hold a chunk without changes: its file was damaged."""
    if payload.form == SAME and not _held(payload):
        chunk = payload.wanted.chunk
        raise DamagedFiles(f"the engine's cache of weights: {chunk.tensor}, {chunk.box}: it is not as published")


def _put_all(fetched: Iterable[tuple[_Payload, memoryview]]) -> None:
    """Writes payloads into the image, and compares whole chunks with their checksums.

    Raises:
        DamagedFiles: A chunk is not as published.
    """
    for payload, data in fetched:
        chunk, parts = payload.wanted.chunk, payload.wanted.parts
        try:
            put(chunk, parts, payload.form, data)
        except WrongPayload as error:
            raise DamagedFiles(f"{payload.key}: {chunk.tensor}, {chunk.box}: {error}") from error
        if any(part.whole and part.crc() != payload.plain for part in parts):
            raise DamagedFiles(f"{payload.key}: {chunk.tensor}, {chunk.box}: it is not as published")


def _ranges(payloads: Sequence[_Payload]) -> Iterator[list[_Payload]]:
    """Yields runs of payloads to read at once."""
    run: list[_Payload] = []
    stored = [payload for payload in payloads if payload.form != SAME]
    for payload in sorted(stored, key=lambda payload: (payload.key, payload.begin)):
        end = payload.begin + payload.size
        if run and (
            payload.key != run[0].key
            or payload.begin > run[-1].begin + run[-1].size + GAP_BYTES
            or end - run[0].begin > RANGE_BYTES
        ):
            yield run
            run = []
        run.append(payload)
    if run:
        yield run
