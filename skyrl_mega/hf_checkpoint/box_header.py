"""The description of a checkpoint, and the check for completeness. Needs no torch.

A checkpoint is a folder of files of boxes (`box_files`) and `checkpoint.json`, written last: a folder without it is no
checkpoint. `checkpoint.json` contains a CRC-32 of each file's header; the header contains a CRC-32 of each entry. So a
file written by another save, at another step or in another run, is detected by the header alone.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json, writing
from skyrl_mega.hf_checkpoint.index import LONGEST_HEADER

HEADER = "checkpoint.json"
FORMAT = 2
"""Version of the format; 2 added checksums of the files' headers."""
_OLD = ".metadata"
"""File of torch's distributed checkpoints, written by earlier versions."""


class Damaged(UserError):
    """Error for a checkpoint with a missing, cut off or changed file. A `UserError`: take another checkpoint."""


@dataclass(frozen=True)
class SavedFile:
    """Size and checksum of a file of boxes when it was saved."""

    nbytes: int
    """Size of the whole file."""
    crc: int
    """CRC-32 of the header."""


@dataclass(frozen=True)
class Header:
    """The content of checkpoint.json."""

    dtype: str
    """Type of the model: `bfloat16` or `float32`."""
    step: int
    """Optimizer steps taken."""
    schedule: dict[str, Any]
    """State of the learning-rate schedule."""
    layout: dict[str, Any]
    """Layout of the writer, for information: a reader may use any other."""
    tensors: dict[str, tuple[int, ...]]
    """Global shapes by Hugging Face name."""
    files: dict[str, SavedFile]
    """Name of a file in the folder → size and checksum."""
    format: int = FORMAT
    """Version of the format."""


def write_header(folder: Path, header: Header) -> None:
    """Writes checkpoint.json and flushes file and folder to the disk; this completes the checkpoint.

    Args:
        folder: The checkpoint's folder, with all files of boxes.
        header: The content to write.

    Raises:
        OSError: checkpoint.json exists already, or the file system failed.
    """
    with writing(folder / HEADER), (folder / HEADER).open("x") as opened:
        json.dump(asdict(header), opened)
        opened.flush()
        os.fsync(opened.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk (fsync), so that new and renamed files survive a power failure. The
    content of the files is not flushed. Raises OSError if the folder is missing or the file system failed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_old(folder: Path) -> None:
    """Raises an error for a checkpoint written by an earlier version of the program. Missing or unreadable files pass:
    `read_header` raises for them.

    Raises:
        UserError: The checkpoint is in an earlier format; names the remedy.
    """
    fix = "go on with that version, or export it there (python -m skyrl_mega.export) and start a new run with "
    fix += "model.path set to the export"
    if (folder / _OLD).exists() and not (folder / HEADER).exists():
        raise UserError(
            f"is a distributed checkpoint of torch ({_OLD}), as versions before {HEADER} wrote "
            f"them; this one does not read it: {fix}",
            key=folder,
        )
    try:
        content = parse_json((folder / HEADER).read_bytes())
    except (OSError, ValueError):  # damaged: `read_header` raises
        return
    if isinstance(content, dict) and (version := content.get("format")) in range(1, FORMAT):
        raise UserError(
            f"format is {version}, of an earlier version; this one reads {FORMAT}: {fix}", key=folder / HEADER
        )


def read_header(folder: Path) -> Header:
    """Returns the content of a checkpoint's checkpoint.json, after a check that every file exists with the saved size;
    the files' content is not read.

    Raises:
        Damaged: checkpoint.json or another file is missing, damaged or of another size; names the file.
        UserError: The checkpoint is in another version of the format.
    """
    refuse_old(folder)
    file = folder / HEADER
    try:
        content = parse_json(file.read_bytes())
        if content["format"] != FORMAT:
            raise UserError(
                f"the checkpoint has format {content['format']}, and this version of skyrl_mega reads format {FORMAT}",
                key=file,
                fix="use the version that saved the checkpoint",
            )
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in content["tensors"].items()}
        files = {name: SavedFile(**written) for name, written in content["files"].items()}
        header = Header(**{**content, "tensors": shapes, "files": files})
        if not all(type(number) is int for written in files.values() for number in (written.nbytes, written.crc)):
            raise Malformed("its files are not listed by name, size and checksum")
    except FileNotFoundError:
        raise Damaged(
            f"{folder}: has no {HEADER}; it is no checkpoint, or its save was interrupted: take another checkpoint"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{file}: cannot be read ({error}); take another checkpoint") from error
    for name, written in header.files.items():
        if Path(name).name != name:
            raise Damaged(f"{file}: {name!r} is no file name; take another checkpoint")
        if not (folder / name).is_file():
            raise Damaged(f"{folder / name}: is missing; the checkpoint is not whole, take another one")
        if (size := (folder / name).stat().st_size) != written.nbytes:
            raise Damaged(
                f"{folder / name}: has {size:,} bytes of {written.nbytes:,}; the file is damaged, take another one"
            )
    return header


def read_table(file: Path, header: Header) -> bytes:
    """Returns the bytes of a file's safetensors header, including the eight bytes of the length, after a comparison
    with the checksum in checkpoint.json.

    Args:
        file: A file of boxes, listed in `header`; KeyError for another file.
        header: The content of checkpoint.json.

    Raises:
        Damaged: The header cannot be read, or differs from the saved header; names the file.
    """
    written = header.files[file.name]
    try:
        with file.open("rb") as opened:
            first = opened.read(8)
            length = int.from_bytes(first, "little")
            if length > min(LONGEST_HEADER, written.nbytes - 8):
                raise Malformed(f"its length is {length}")
            table = first + opened.read(length)
    except (OSError, Malformed) as error:
        raise Damaged(f"{file}: its header cannot be read ({error}); take another checkpoint") from error
    if (crc := zlib.crc32(table)) != written.crc:
        raise Damaged(
            f"{file}: its header has CRC-32 {crc:08x}, at optimizer step {header.step} it was saved with "
            f"{written.crc:08x}; the file is damaged or of another step, take another checkpoint"
        )
    return table


def check_tables(folder: Path) -> None:
    """Raises an error unless every file of a checkpoint was written by the checkpoint's own save. Compares sizes and
    headers, and does not read tensors: damaged data inside a file passes (`box_files.check_entries`).

    Raises:
        Damaged: A file belongs to another save, is incomplete or is missing; names the file.
        UserError: The checkpoint is in another version of the format.
    """
    header = read_header(folder)
    for name in header.files:
        read_table(folder / name, header)
