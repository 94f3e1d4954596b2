"""What a checkpoint is of, and whether it is whole. Needs no torch.

A checkpoint is a folder of files of boxes (`box_files`) and `checkpoint.json`, which is written last: a folder without
it is none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import Malformed, parsed

HEADER = "checkpoint.json"
FORMAT = 1
_OLD = ".metadata"
"""Of torch's distributed checkpoints, which earlier versions wrote."""


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
    files: dict[str, int]
    """File → bytes."""
    format: int = FORMAT


def write_header(folder: Path, header: Header) -> None:
    """Writes checkpoint.json and brings it and the folder to the disk: the checkpoint is whole from now on."""
    with (folder / HEADER).open("x") as opened:
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
        UserError: says what to do with it.
    """
    if (folder / _OLD).exists() and not (folder / HEADER).exists():
        raise UserError(
            f"{folder}: is a distributed checkpoint of torch ({_OLD}), as versions before {HEADER} wrote them; this "
            "one does not read it: go on with that version, or export it there (python -m skyrl_mega.export) and start "
            "a new run with model.path set to the export"
        )


def read_header(folder: Path) -> Header:
    """What a checkpoint is of; all its files are there and whole, by their lengths.

    Raises:
        UserError: it is not whole, damaged, or of another version; names the file.
    """
    refuse_old(folder)
    file = folder / HEADER
    try:
        content = parsed(file.read_bytes())
        if content["format"] != FORMAT:
            raise UserError(f"{file}: format is {content['format']}; this version reads {FORMAT}, use the other one")
        shapes = {str(name): tuple(int(n) for n in shape) for name, shape in content["tensors"].items()}
        header = Header(**{**content, "tensors": shapes})
        if not all(isinstance(name, str) and type(size) is int for name, size in header.files.items()):
            raise Malformed("files are no names and sizes")
    except FileNotFoundError:
        raise UserError(f"{folder}: has no {HEADER}; it is no checkpoint, or its save was interrupted") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: cannot be read ({error}); take another checkpoint") from error
    for name, size in header.files.items():
        if Path(name).name != name:
            raise UserError(f"{file}: {name!r} is no file name; take another checkpoint")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: is missing; the checkpoint is not whole, take another one")
        if (there := (folder / name).stat().st_size) != size:
            raise UserError(f"{folder / name}: has {there:,} bytes of {size:,}; the file is damaged, take another one")
    return header
