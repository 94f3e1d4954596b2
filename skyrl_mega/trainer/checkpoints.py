"""A run's checkpoints on disk: written whole or not at all, the newest whole one found, the last few kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.channel import removed_at_the_end
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.safe_read import parse_json, read_json, writing
from skyrl_mega.hf_checkpoint.box_header import HEADER, Damaged, check_tables, refuse_old, sync_folder
from skyrl_mega.telemetry.run_dir import by_step, checkpoints_in

_STATE = "state.json"
_FILES = "files"
"""Key in the state: every other file's size in bytes, by its path within the checkpoint."""
_CRCS = "crc32"
"""Key in the state: the CRC-32 of every other file, by its path within the checkpoint, but of the ranks' files, which
`checkpoint.json` proves; and as `state.json` that of the rest of the state."""
_BOXES = ".safetensors"
"""The ending of a rank's file."""
PARTIAL = ".partial"
"""The ending of a checkpoint that is being written."""


class NoRoom(OSError):
    """The disk has no room for a checkpoint; nothing was written."""


class Checkpoints:
    """The folder `checkpoints/` of a run: `step_000010/{policy/, critic/, state.json}`, the critic where there is one.

    A checkpoint is written under a temporary name and renamed when it is complete, and tells how long its files are.
    Entries under other names and links belong to the user: they are never resumed from, counted or removed.

    Args:
        folder: Where they lie.
        keep: So many newest ones stay.
        say: Tells a person what is wrong with one.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None] = print) -> None:
        self.folder, self.keep, self.say = folder, keep, say
        self._said: set[str] = set()
        self._damaged: dict[Path, str] = {}
        """What ranks have found as they read checkpoints."""

    def completed(self) -> list[Path]:
        """Checkpoints that were written to their end once, the newest last. A disk may have damaged them since."""
        return list(checkpoints_in(self.folder).values())

    def newest(self) -> Path | None:
        """The newest whole checkpoint; says which newer ones are damaged, and how.

        Raises:
            UserError: There are some, and none is whole; or the newest one is an earlier version's.
        """
        damaged = []
        for checkpoint in reversed(self.completed()):
            refuse_old(checkpoint / "policy")
            damage = self._damaged.get(checkpoint) or _damage(checkpoint)
            if damage is None:
                return checkpoint
            self._say_once(f"{checkpoint} is left out: {damage}")
            damaged.append(damage)
        if damaged:
            raise UserError(
                f"{self.folder}: none of its {len(damaged)} checkpoints is whole ({damaged[0]}); bring the files back, "
                "or remove the folder to begin again"
            )
        return None

    def state(self, checkpoint: Path) -> dict[str, Any]:
        """The driver's state in a checkpoint."""
        state: dict[str, Any] = read_json(checkpoint / _STATE, "take another checkpoint")
        del state[_FILES], state[_CRCS]
        return state

    def leave_out(self, checkpoint: Path, damage: Damaged) -> None:
        """Notes that a checkpoint is damaged: `newest` returns it no more."""
        self._damaged[checkpoint] = str(damage)

    def save(self, step: int, state: dict[str, Any], parts: Mapping[str, Callable[[Path], object]]) -> Path:
        """Writes a checkpoint, then removes those beyond `keep` and what an interrupted save left.

        Args:
            step: RL steps done.
            state: The driver's.
            parts: Folder of each model, and of others → what saves it there.

        Raises:
            NoRoom: The disk has less room than the last checkpoint takes.
            FileExistsError: Something that no run wrote has the checkpoint's name.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        for old in by_step(self.folder, PARTIAL).values():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        self.folder.mkdir(exist_ok=True)  # and not the run's folder: where that is gone, its disk is
        with removed_at_the_end(partial):
            partial.mkdir()
            self._check_room()
            for name, save in parts.items():
                (partial / name).mkdir()
                save(partial / name)
            with writing(partial / _STATE), (partial / _STATE).open("w") as opened:
                json.dump(_proved({**state, _FILES: _sizes(partial), _CRCS: _crcs(partial)}), opened)
                opened.flush()
                os.fsync(opened.fileno())
            sync_folder(partial)
            if os.path.lexists(final):
                if foreign := _foreign(final):
                    raise FileExistsError(errno.EEXIST, "no save wrote it, and it is not replaced", str(foreign))
                shutil.rmtree(final)
            partial.rename(final)
        sync_folder(self.folder)
        for old in self.completed()[: -self.keep]:
            if foreign := _foreign(old):
                self._say_once(f"{old} is kept: no save wrote {foreign}; move it elsewhere")
            else:
                shutil.rmtree(old)
        return final

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _check_room(self) -> None:
        last = self.completed()[-1:]
        needed = sum(size for checkpoint in last for size in _sizes(checkpoint).values())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise NoRoom(f"it takes about {needed / 1e9:.3g} GB, and {self.folder} has {free / 1e9:.3g} GB free")


def resumes_from(folder: Path) -> str:
    """What the same command does after a run has ended early: what is saved, and nothing else, is promised.

    Args:
        folder: A run's `checkpoints/`.
    """
    checkpoint = newest_whole(folder)
    if checkpoint is None:
        return "no checkpoint is saved: the same command begins with the first step"
    step = json.loads((checkpoint / _STATE).read_text())["step"]
    return f"{checkpoint} is saved: the same command resumes after step {step}"


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint in the folder that is not damaged; None without one."""
    return next((path for path in reversed(checkpoints_in(folder).values()) if _damage(path) is None), None)


def refuse_unusable(folder: Path) -> None:
    """Refuses checkpoints that a run can neither resume from nor replace, before anything is started.

    Raises:
        UserError: The newest one in `folder` was saved by an earlier version; or a link or a file has the name of one.
    """
    saved = checkpoints_in(folder)
    for path in (*by_step(folder).values(), *by_step(folder, PARTIAL).values()):
        if path.is_symlink() or not path.is_dir():
            kind = "a link" if path.is_symlink() else "no folder"
            raise UserError(f"{path}: is {kind}, where a run saves a checkpoint as a folder; move it elsewhere")
    if saved:
        refuse_old(saved[max(saved)] / "policy")


def _sizes(checkpoint: Path) -> dict[str, int]:
    # Turns that a process has not written in time are given up, and it may still be at its file (`rollout.journal`).
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != _STATE and p.name[:7] != ".turns-")
    return {str(p.relative_to(checkpoint)): p.stat().st_size for p in files}


def _foreign(checkpoint: Path) -> Path | None:
    """Something in a checkpoint's place that no save wrote; None without it."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return checkpoint
    try:
        saved = {_STATE, *parse_json((checkpoint / _STATE).read_bytes())[_FILES]}
    except (OSError, ValueError, KeyError, TypeError):
        return checkpoint
    files = (path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir())
    return next((p for p in files if str(p.relative_to(checkpoint)) not in saved and p.name[:7] != ".turns-"), None)


def _crcs(checkpoint: Path) -> dict[str, int]:
    return {name: _crc(checkpoint / name) for name in _sizes(checkpoint) if not name.endswith(_BOXES)}


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _proved(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the check sum of the rest of it."""
    others = {name: crc for name, crc in state[_CRCS].items() if name != _STATE}
    text = json.dumps({**state, _CRCS: others})
    return {**state, _CRCS: {**others, _STATE: zlib.crc32(text.encode())}}


def _damage(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint; None where nothing is. Of the ranks' files only headers are read."""
    try:
        state = parse_json((checkpoint / _STATE).read_bytes())
        sizes, crcs = state[_FILES].items(), state[_CRCS]
        if _proved(state) != state:
            return f"{_STATE} is not as it was saved (CRC-32)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_STATE} cannot be read ({type(error).__name__})"
    there = _sizes(checkpoint)
    for name, size in sizes:
        if name not in there:
            return f"{name} is missing"
        if there[name] != size:
            return f"{name} has {there[name]:,} bytes of {size}"
        if name in crcs and _crc(checkpoint / name) != crcs[name]:
            return f"{name} is not as it was saved (CRC-32)"
    try:
        for header in checkpoint.glob(f"*/{HEADER}"):
            check_tables(header.parent)
    except Damaged as error:
        return str(error)
    return None


def check_saved_together(part: Path) -> None:
    """Checks that a model's folder in a checkpoint is the one that was saved with the checkpoint's state.

    Raises:
        Damaged: It is of another step.
    """
    try:
        saved = parse_json((part.parent / _STATE).read_bytes())[_CRCS][f"{part.name}/{HEADER}"]
        there = zlib.crc32((part / HEADER).read_bytes())
    except (OSError, ValueError, KeyError, TypeError):  # a folder by itself
        return
    if there != saved:
        raise Damaged(f"{part / HEADER}: was not saved with {part.parent / _STATE} (CRC-32); take another checkpoint")
