"""What a checkpoint is of, and whether it is whole. Needs no torch.

A checkpoint is a folder of files of boxes (`box_files`) and `checkpoint.json`, which is written last: a folder without
it is none. It has a CRC-32 of each file's header, and that has a CRC-32 of each entry: a file that another save wrote,
at another step or in another run, is found by its header alone.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.safe_read import Malformed, parse_json, writing
from skyrl_mega.hf_checkpoint.index import LONGEST_HEADER

HEADER = "checkpoint.json"
FORMAT = 2
"""2 has check sums of the files' headers."""
_OLD = ".metadata"
"""Of torch's distributed checkpoints, which earlier versions wrote."""


class Damaged(UserError):
    """A file of a checkpoint that is not as it was saved."""


@dataclass(frozen=True)
class Written:
    """A file of boxes as it was saved."""

    nbytes: int
    crc: int
    """CRC-32 of its header."""


@dataclass(frozen=True)
class Header:
    """The content of checkpoint.json."""

    dtype: str
    """Of the model: `bfloat16` or `float32`."""
    step: int
    """Optimizer steps taken."""
    schedule: dict[str, Any]
    """State of the learning-rate schedule."""
    layout: dict[str, Any]
    """The layout that wrote it, for people: any other reads it."""
    tensors: dict[str, tuple[int, ...]]
    """Global shapes by Hugging Face name."""
    files: dict[str, Written]
    format: int = FORMAT


def write_header(folder: Path, header: Header) -> None:
    """Writes checkpoint.json and brings it and the folder to the disk: the checkpoint is whole from now on."""
    with writing(folder / HEADER), (folder / HEADER).open("x") as opened:
        json.dump(asdict(header), opened)
        opened.flush()
        os.fsync(opened.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_old(folder: Path) -> None:
    """Refuses a checkpoint of an earlier version by name.

    Raises:
        UserError: Says what to do with it.
    """
    fix = "go on with that version, or export it there (python -m skyrl_mega.export) and start a new run with "
    fix += "model.path set to the export"
    if (folder / _OLD).exists() and not (folder / HEADER).exists():
        raise UserError(
            f"{folder}: is a distributed checkpoint of torch ({_OLD}), as versions before {HEADER} wrote them; this "
            f"one does not read it: {fix}"
        )
    try:
        content = parse_json((folder / HEADER).read_bytes())
    except (OSError, ValueError):  # it is damaged
        return
    if isinstance(content, dict) and (there := content.get("format")) in range(1, FORMAT):
        raise UserError(f"{folder / HEADER}: format is {there}, of an earlier version; this one reads {FORMAT}: {fix}")


def read_header(folder: Path) -> Header:
    """Reads what a checkpoint is of; all its files are there and whole, by their lengths.

    Raises:
        Damaged: It is not whole; names the file.
        UserError: It is of another version.
    """
    refuse_old(folder)
    file = folder / HEADER
    try:
        content = parse_json(file.read_bytes())
        if content["format"] != FORMAT:
            raise UserError(f"{file}: format is {content['format']}; this version reads {FORMAT}, use the other one")
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in content["tensors"].items()}
        files = {name: Written(**written) for name, written in content["files"].items()}
        header = Header(**{**content, "tensors": shapes, "files": files})
        if not all(type(number) is int for written in files.values() for number in (written.nbytes, written.crc)):
            raise Malformed("files are no names, sizes and check sums")
    except FileNotFoundError:
        raise Damaged(f"{folder}: has no {HEADER}; it is no checkpoint, or its save was interrupted") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{file}: cannot be read ({error}); take another checkpoint") from error
    for name, written in header.files.items():
        if Path(name).name != name:
            raise Damaged(f"{file}: {name!r} is no file name; take another checkpoint")
        if not (folder / name).is_file():
            raise Damaged(f"{folder / name}: is missing; the checkpoint is not whole, take another one")
        if (there := (folder / name).stat().st_size) != written.nbytes:
            raise Damaged(
                f"{folder / name}: has {there:,} bytes of {written.nbytes:,}; the file is damaged, take another one"
            )
    return header


def read_table(file: Path, header: Header) -> bytes:
    """Returns the header of a file of boxes, with the eight bytes of its length.

    Raises:
        Damaged: It is not the one that was saved.
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
    """Checks that every file of a checkpoint was written by the save that it is of, without reading its tensors.

    Raises:
        Damaged: One was not, or is not whole; names it.
        UserError: The checkpoint is of another version.
    """
    header = read_header(folder)
    for name in header.files:
        read_table(folder / name, header)
