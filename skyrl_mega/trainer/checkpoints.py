"""A run's checkpoints on disk: atomic writes, search for the newest intact checkpoint, retention of the last few."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.channel import removed_after_crash
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import parse_json, read_json, writing
from skyrl_mega.hf_checkpoint.box_header import HEADER, Damaged, check_tables, refuse_old, sync_folder
from skyrl_mega.telemetry.run_dir import by_step, checkpoints_in

_STATE = "state.json"
_FILES = "files"
"""Key of the state: sizes in bytes of all other files, by path within the checkpoint."""
_CRCS = "crc32"
"""Key of the state: CRC-32 of all other files, by path within the checkpoint, except the ranks' files, protected by
`checkpoint.json`. The entry `state.json` is the CRC-32 of the rest of the state."""
_RANK_FILE_SUFFIX = ".safetensors"
"""Suffix of the ranks' files."""
PARTIAL = ".partial"
"""Suffix of a checkpoint being written."""


class DiskFull(OSError):
    """The disk lacks space for a checkpoint; nothing was written."""


class Checkpoints:
    """The folder `checkpoints/` of a run: `step_000010/{policy/, critic/, state.json}`, with a critic if the run trains
    a critic.

    A checkpoint is written under a temporary name, renamed once complete, and records the sizes of the files. Entries
    under other names and links belong to the user: the run never resumes from, counts or removes such entries.

    Args:
        folder: The folder.
        keep: Number of newest checkpoints to keep.
        say: Prints a line about a checkpoint that is skipped or kept.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None] = print) -> None:
        self.folder, self.keep = folder, keep
        self._say_once = cache(say)
        """Prints a line, unless the same line was printed before."""
        self._damaged: dict[Path, str] = {}
        """Damage found by ranks while reading checkpoints."""

    def completed(self) -> list[Path]:
        """Returns the folders of all completely written checkpoints, the newest last. Does not check the files for
        later damage."""
        return list(checkpoints_in(self.folder).values())

    def newest(self) -> Path | None:
        """Returns the newest intact checkpoint, or None without any, also without the folder; prints the damage of
        newer checkpoints, each once.

        Raises:
            UserError: All checkpoints are damaged, or the newest intact one, or a newer damaged one, was written by an
                earlier version.
        """
        damaged = []
        for checkpoint in reversed(self.completed()):
            refuse_old(checkpoint / "policy")
            damage = self._damaged.get(checkpoint) or _damage(checkpoint)
            if damage is None:
                return checkpoint
            self._say_once(f"{checkpoint} is damaged and skipped: {damage}")
            damaged.append(damage)
        if damaged:
            raise UserError(
                f"all checkpoints here ({len(damaged)}) are damaged (the newest: {damaged[0]})",
                key=self.folder,
                fix="restore the files, or remove the folder to start from the first step",
            )
        return None

    def state(self, checkpoint: Path) -> dict[str, Any]:
        """Returns the driver's state from a checkpoint's `state.json`, without the sizes and checksums of the files.

        Raises:
            UserError: The checkpoint's `state.json` is missing or cannot be read.
        """
        state: dict[str, Any] = read_json(checkpoint / _STATE, "take another checkpoint")
        del state[_FILES], state[_CRCS]
        return state

    def mark_damaged(self, checkpoint: Path, damage: Damaged) -> None:
        """Records in this object that a rank found a checkpoint damaged; `newest` then skips the checkpoint."""
        self._damaged[checkpoint] = str(damage)

    def save(self, step: int, state: dict[str, Any], parts: Mapping[str, Callable[[Path], object]]) -> Path:
        """Writes a checkpoint and returns its folder. Removes remains of an interrupted save first, and afterwards the
        checkpoints beyond the newest `keep`, except checkpoints with files that the run did not write.

        An earlier checkpoint of the same step is replaced. If a part raises an error, the error passes and no earlier
        checkpoint is changed; the next save removes the partial folder.

        Args:
            step: Completed RL steps.
            state: The driver's state.
            parts: Folder name of each model or other part → function saving into this folder.

        Raises:
            DiskFull: The free space is below the size of the last checkpoint; checked before any part is saved.
            FileExistsError: The entry with the checkpoint's name is not, or not entirely, written by a run; checked
                after all parts are saved.
            OSError: A file could not be written, or the run's folder is missing.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        for old in by_step(self.folder, PARTIAL).values():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        self.folder.mkdir(exist_ok=True)  # without parents: a missing run folder means a lost disk
        with removed_after_crash(partial):
            partial.mkdir()
            self._check_free_space()
            for name, save in parts.items():
                (partial / name).mkdir()
                save(partial / name)
            with writing(partial / _STATE), (partial / _STATE).open("w") as opened:
                json.dump(_with_checksum({**state, _FILES: _sizes(partial), _CRCS: _crcs(partial)}), opened)
                opened.flush()
                os.fsync(opened.fileno())
            sync_folder(partial)
            if os.path.lexists(final):
                if foreign := _foreign_file(final):
                    raise FileExistsError(
                        errno.EEXIST,
                        "not written by a run, so no checkpoint replaces it; move it elsewhere",
                        str(foreign),
                    )
                shutil.rmtree(final)
            partial.rename(final)
        sync_folder(self.folder)
        for old in self.completed()[: -self.keep]:
            if foreign := _foreign_file(old):
                self._say_once(
                    f"the old checkpoint {old} is not removed, as the run did not write {foreign}; move this file "
                    "elsewhere"
                )
            else:
                shutil.rmtree(old)
        return final

    def _check_free_space(self) -> None:
        last = self.completed()[-1:]
        needed = sum(size for checkpoint in last for size in _sizes(checkpoint).values())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise DiskFull(
                f"a checkpoint needs about {needed / 1e9:.3g} GB, and the disk of {self.folder} has "
                f"{free / 1e9:.3g} GB free"
            )


def describe_resume(folder: Path, *, resume: bool = True) -> str:
    """Returns a sentence on the effect of running the same command again after an early end: the newest intact
    checkpoint and its step, or the first step without such a checkpoint or with `resume=False`.

    Args:
        folder: A run's `checkpoints/`.
        resume: The run's `checkpoint.resume`.

    Raises:
        UserError: A checkpoint was written by an earlier version.
    """
    checkpoint = newest_intact(folder)
    if checkpoint is None:
        saved = "every saved checkpoint is damaged" if checkpoints_in(folder) else "no checkpoint is saved"
        return f"{saved}: the same command begins with the first step"
    if not resume:
        return f"{checkpoint} is saved: the same command with checkpoint.resume=true resumes from it"
    step = json.loads((checkpoint / _STATE).read_text())["step"]
    return f"{checkpoint} is saved: the same command resumes after step {step}"


def newest_intact(folder: Path) -> Path | None:
    """Returns the newest checkpoint in the folder without damage (sizes and checksums agree); None without any. Raises
    UserError if a checkpoint was written by an earlier version."""
    return next((path for path in reversed(checkpoints_in(folder).values()) if _damage(path) is None), None)


def refuse_unusable(folder: Path) -> None:
    """Raises an error if a run can neither resume from nor replace an entry of a checkpoints folder.

    Raises:
        UserError: The newest checkpoint was written by an earlier version, or a link or file uses a checkpoint's name.
    """
    saved = checkpoints_in(folder)
    for path in (*by_step(folder).values(), *by_step(folder, PARTIAL).values()):
        if path.is_symlink() or not path.is_dir():
            kind = "a link" if path.is_symlink() else "no folder"
            raise UserError(f"is {kind}, where a run saves a checkpoint as a folder", key=path, fix="move it elsewhere")
    if saved:
        refuse_old(saved[max(saved)] / "policy")


def _sizes(checkpoint: Path) -> dict[str, int]:
    # Skips `.turns-*`: a process too late for this checkpoint may still be writing its turns (`rollout.journal`).
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != _STATE and p.name[:7] != ".turns-")
    return {str(p.relative_to(checkpoint)): p.stat().st_size for p in files}


def _foreign_file(checkpoint: Path) -> Path | None:
    """Returns a path in a checkpoint's place not written by a save; None without any."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return checkpoint
    try:
        saved = {_STATE, *parse_json((checkpoint / _STATE).read_bytes())[_FILES]}
    except (OSError, ValueError, KeyError, TypeError):
        return checkpoint
    files = (path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir())
    return next((p for p in files if str(p.relative_to(checkpoint)) not in saved and p.name[:7] != ".turns-"), None)


def _crcs(checkpoint: Path) -> dict[str, int]:
    return {name: _crc(checkpoint / name) for name in _sizes(checkpoint) if not name.endswith(_RANK_FILE_SUFFIX)}


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _with_checksum(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state with the CRC-32 of the other entries."""
    others = {name: crc for name, crc in state[_CRCS].items() if name != _STATE}
    text = json.dumps({**state, _CRCS: others})
    return {**state, _CRCS: {**others, _STATE: zlib.crc32(text.encode())}}


def _damage(checkpoint: Path) -> str | None:
    """Returns a description of a checkpoint's damage; None if intact. Reads only the headers of the ranks' files."""
    try:
        state = parse_json((checkpoint / _STATE).read_bytes())
        sizes, crcs = state[_FILES].items(), state[_CRCS]
        if _with_checksum(state) != state:
            return f"{_STATE} was changed after the save (its CRC-32 differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_STATE} cannot be read ({type(error).__name__})"
    present = _sizes(checkpoint)
    for name, size in sizes:
        if name not in present:
            return f"{name} is missing"
        if present[name] != size:
            return f"{name} has {present[name]:,} of {size} bytes"
        if name in crcs and _crc(checkpoint / name) != crcs[name]:
            return f"{name} was changed after the save (its CRC-32 differs)"
    try:
        for header in checkpoint.glob(f"*/{HEADER}"):
            check_tables(header.parent)
    except Damaged as error:
        return str(error)
    return None


def check_saved_together(part: Path) -> None:
    """Raises an error if a model's folder was not saved together with the `state.json` beside it. Accepts a folder
    outside of a checkpoint, and any folder if `state.json` or the folder's `checkpoint.json` cannot be read. `part` is
    the model's folder inside of a checkpoint.

    Raises:
        Damaged: The folder was saved at another step.
    """
    try:
        expected = parse_json((part.parent / _STATE).read_bytes())[_CRCS][f"{part.name}/{HEADER}"]
        present = zlib.crc32((part / HEADER).read_bytes())
    except (OSError, ValueError, KeyError, TypeError):  # a model's folder outside of a checkpoint
        return
    if present != expected:
        raise Damaged(f"{part / HEADER}: was not saved with {part.parent / _STATE} (CRC-32); take another checkpoint")
