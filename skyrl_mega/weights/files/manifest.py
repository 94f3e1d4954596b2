"""The descriptions in a store of weight files: manifest, layout of a rank, index of a rank's file.

    <publisher>/layout-00003            chunks of policy rank 3: tensor, type and box of each
    <publisher>/000000012/rank-00003    payloads of rank 3's chunks in this order, then their index
    <publisher>/000000012.json          manifest, written last: a version without a manifest does not exist

A publisher is a start of a run's policy: a run that resumes, perhaps in another layout, is a new publisher. The
publications of a publisher are numbered; a name such as `<publisher>/000000012` is never used again. The manifest names
the version of the weights and the base: the publication whose bytes a reader must have, "" for a full image.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import torch

from skyrl_mega.common.safe_read import MOST_BYTES, Malformed, parse_json
from skyrl_mega.parallel.box import Box
from skyrl_mega.weights.files.store import Store

FORMAT = "skyrl_mega.weights.files 1"
"""Format named in every manifest."""
MAGIC = b"skyrlW1\n"
"""First bytes of every layout and of every rank's file."""
KEY = re.compile(r"[0-9a-f]{16}/(?:layout-\d{5}|\d{9}\.json|\d{9}/rank-\d{5})")
"""Keys of all objects written here."""
NAME = re.compile(r"[0-9a-f]{16}/\d{9}")
"""Names of publications."""
_SIZE_BYTES = 8
"""Bytes of the length before a compressed JSON text."""
_CODES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8": torch.float8_e4m3fn}
_NAMES = {dtype: code for code, dtype in _CODES.items()}


class DamagedFiles(RuntimeError):
    """An object whose content is not as written; names the object."""


@dataclass(frozen=True)
class StoredFile:
    """An object of a rank, and its description at the end."""

    nbytes: int
    """Size of the object."""
    begin: int
    """First byte of the description: the index of a rank's file, the table of a layout."""
    crc: int
    """CRC-32 of the description."""


@dataclass(frozen=True)
class Manifest:
    """A publication of a version of the weights."""

    name: str
    """Name of the publication: `<publisher>/<number>`."""
    version: int
    """Version of the weights."""
    base: str
    """Name of the publication before the changes; "" for a full image."""
    fp8: bool
    """True if linear weights are stored as E4M3 with scales."""
    files: tuple[StoredFile, ...]
    """The file of each policy rank."""
    layouts: tuple[StoredFile, ...]
    """The layout of each policy rank."""

    @property
    def publisher(self) -> str:
        """The publisher's part of the name."""
        return self.name.partition("/")[0]

    def file(self, rank: int) -> str:
        """Returns the key of a rank's file."""
        return f"{self.name}/rank-{rank:05d}"

    def layout(self, rank: int) -> str:
        """Returns the key of a rank's layout."""
        return layout_key(self.publisher, rank)


def layout_key(publisher: str, rank: int) -> str:
    """Returns the key of the layout of a publisher's rank."""
    return f"{publisher}/layout-{rank:05d}"


def publication(publisher: str, number: int) -> str:
    """Returns the name of a publisher's publication with this number."""
    return f"{publisher}/{number:09d}"


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Writes a manifest; the version exists from here on.

    Raises:
        StoreError: The store failed.
    """
    store.write(f"{manifest.name}.json", json.dumps({"format": FORMAT, **asdict(manifest)}).encode())


def read_manifest(store: Store, name: str) -> Manifest:
    """Returns the manifest of a publication.

    Args:
        store: The store.
        name: Name of the publication.

    Raises:
        Absent: The publication does not exist.
        StoreError: The store failed.
        DamagedFiles: The object is no manifest of this name.
    """
    data = store.read(f"{name}.json")
    try:
        content = parse_json(data)
        if content.pop("format") != FORMAT or content["name"] != name:
            raise Malformed(f"it is no manifest of {name}")
        files, layouts = (tuple(StoredFile(**file) for file in content.pop(key)) for key in ("files", "layouts"))
        manifest = Manifest(files=files, layouts=layouts, **content)
        if manifest.base and not NAME.fullmatch(manifest.base):
            raise Malformed(f"its base is {manifest.base!r}")
        numbers = [n for file in (*files, *layouts) for n in (file.nbytes, file.begin, file.crc)]
        if len(files) != len(layouts) or not all(type(n) is int and n >= 0 for n in numbers):
            raise Malformed("its files are not listed by size, begin and checksum")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFiles(f"{store.address}: {name}.json: cannot be read ({error})") from error
    return manifest


# ---- layouts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored as a payload: the unit of reading, of changes and of checksums."""

    tensor: str
    """Hugging Face name."""
    box: Box
    """Position in the whole tensor."""
    dtype: torch.dtype
    """Type of the stored elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.dtype.itemsize


def layout_data(chunks: Sequence[Chunk]) -> tuple[bytes, StoredFile]:
    """Returns the content of a layout object, and its description for the manifest. `chunks` are the chunks of a rank,
    in the order of the payloads."""
    tensors: dict[str, int] = {}
    rows = [[tensors.setdefault(c.tensor, len(tensors)), _NAMES[c.dtype], *c.box.start, *c.box.shape] for c in chunks]
    table = compressed({"tensors": list(tensors), "chunks": rows})
    return MAGIC + table, StoredFile(len(MAGIC) + len(table), len(MAGIC), zlib.crc32(table))


def read_layout(store: Store, manifest: Manifest, rank: int) -> list[Chunk]:
    """Returns the chunks of a policy rank, in the order of the payloads.

    Raises:
        Absent, StoreError: As in `Store.read`.
        DamagedFiles: The object is not as written.
    """
    key = manifest.layout(rank)
    content = read_description(store, key, manifest.layouts[rank])
    try:
        chunks = []
        for tensor, code, *box in content["chunks"]:
            half = len(box) // 2
            place = Box(tuple(box[:half]), tuple(box[half:]))
            if len(box) != 2 * half or not all(type(n) is int and n >= 0 for n in box) or not place.numel:
                raise Malformed(f"{box} is no box")
            chunks.append(Chunk(content["tensors"][tensor], place, _CODES[code]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFiles(f"{store.address}: {key}: cannot be read ({error})") from error
    return chunks


# ---- indices -------------------------------------------------------------------------------------------------------


@dataclass
class PayloadIndex:
    """The payloads of a rank's file, a list entry for each chunk of the rank's layout."""

    forms: list[int]
    """Form of each payload (`coding`)."""
    sizes: list[int]
    """Bytes of each payload; the payloads follow one another from byte `len(MAGIC)` on."""
    stored: list[int]
    """CRC-32 of each payload."""
    plain: list[int]
    """CRC-32 of each chunk's bytes in this version."""


def read_index(store: Store, manifest: Manifest, rank: int, chunks: int) -> PayloadIndex:
    """Returns the index of a policy rank's file.

    Args:
        store: The store.
        manifest: Manifest of the publication.
        rank: The policy rank.
        chunks: Number of chunks in the rank's layout.

    Raises:
        Absent, StoreError: As in `Store.read`.
        DamagedFiles: The object is not as written, or has another number of payloads than `chunks`.
    """
    key = manifest.file(rank)
    content = read_description(store, key, manifest.files[rank])
    try:
        index = PayloadIndex(**content)
        columns = (index.forms, index.sizes, index.stored, index.plain)
        if any(len(column) != chunks or not all(type(n) is int and n >= 0 for n in column) for column in columns):
            raise Malformed(f"it does not describe {chunks} payloads")
    except (ValueError, TypeError) as error:
        raise DamagedFiles(f"{store.address}: {key}: cannot be read ({error})") from error
    return index


def compressed(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON value as bytes: the length of its text in 8 bytes, little-endian, then the text compressed by
    zstd."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return len(text).to_bytes(_SIZE_BYTES, "little") + pa.compress(text, "zstd", asbytes=True)


def read_description(store: Store, key: str, file: StoredFile) -> Any:
    """Returns the description at the end of an object: the JSON value given to `compressed`.

    Args:
        store: The store.
        key: Key of the object.
        file: Size, place and checksum of the description, from the manifest.

    Raises:
        Absent, StoreError: As in `Store.read`.
        DamagedFiles: The description differs from the one written.
    """
    data = store.read(key, file.begin, file.nbytes - file.begin)
    try:
        size = int.from_bytes(data[:_SIZE_BYTES], "little")
        if zlib.crc32(data) != file.crc or size > MOST_BYTES:
            raise Malformed("its checksum differs")
        return parse_json(pa.decompress(data[_SIZE_BYTES:], size, "zstd", asbytes=True))
    except (ValueError, OSError) as error:  # OSError: pyarrow's
        raise DamagedFiles(f"{store.address}: {key}: cannot be read ({error})") from error
