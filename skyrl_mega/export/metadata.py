"""What a distributed checkpoint (torch.distributed.checkpoint's) holds, read without a process group.

`.metadata` says which box of which tensor lies in which bytes of which file. It is a pickle, read with the few names
that it needs, so that nothing in it is executed.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from skyrl_mega.config.errors import UserError
from skyrl_mega.export.records import Record, StoredTensor
from skyrl_mega.layout.box import Box

METADATA = ".metadata"
COMPLETE = "metadata.json"
"""megatron-core writes it last."""

_PACKAGE = "torch.distributed.checkpoint."
_NAMES = {
    (_PACKAGE + "metadata", "Metadata"),
    (_PACKAGE + "metadata", "TensorStorageMetadata"),
    (_PACKAGE + "metadata", "BytesStorageMetadata"),
    (_PACKAGE + "metadata", "ChunkStorageMetadata"),
    (_PACKAGE + "metadata", "TensorProperties"),
    (_PACKAGE + "metadata", "_MEM_FORMAT_ENCODING"),
    (_PACKAGE + "metadata", "MetadataIndex"),
    (_PACKAGE + "metadata", "StorageMeta"),
    (_PACKAGE + "planner", "SavePlan"),
    (_PACKAGE + "planner", "WriteItem"),
    (_PACKAGE + "planner", "WriteItemType"),
    (_PACKAGE + "planner", "TensorWriteData"),
    (_PACKAGE + "planner", "BytesIOWriteData"),
    (_PACKAGE + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
"""What `.metadata` may name, besides torch's types of numbers."""


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a distributed checkpoint, by key.

    Raises:
        UserError: it is not whole: the file that is missing or cut off is named.
    """
    for name in (METADATA, COMPLETE):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no {name}; it is no distributed checkpoint, or its save was interrupted")
    file = folder / METADATA
    try:
        with file.open("rb") as opened:
            found = _Metadata(opened).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        tensors = {
            key: _tensor(folder, found, key, value)
            for key, value in found.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        AttributeError,
        ImportError,
        TypeError,
        pickle.PickleError,
    ) as error:
        raise UserError(f"{file}: cannot be read ({error}); take another checkpoint") from error
    _check_sizes(tensors)
    return tensors


def _tensor(folder: Path, metadata: Metadata, key: str, value: TensorStorageMetadata) -> StoredTensor:
    records = []
    for chunk in value.chunks:
        info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
            raise ValueError(f"{key} lies in {info.relative_path!r}, which is no plain file of the folder")
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        file = folder / info.relative_path
        records.append(Record(key, box, value.properties.dtype, file, info.offset, info.length))
    return StoredTensor(tuple(value.size), value.properties.dtype, tuple(records))


def _check_sizes(tensors: dict[str, StoredTensor]) -> None:
    """Every file is as long as its records need."""
    needed: dict[Path, int] = {}
    for tensor in tensors.values():
        for record in tensor.records:
            needed[record.file] = max(needed.get(record.file, 0), record.offset + record.length)
    for file, size in sorted(needed.items()):
        if not file.is_file():
            raise UserError(f"{file}: is missing; the checkpoint is not whole, take another one")
        if (there := file.stat().st_size) < size:
            raise UserError(
                f"{file}: {there} bytes, .metadata asks for {size}; the file is cut off, take another checkpoint"
            )


class _Metadata(pickle.Unpickler):
    """Reads `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
