"""A run's checkpoints on disk: written whole or not at all, the newest whole one found, the last few kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.channel import removed_at_the_end
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import json_object, parsed
from skyrl_mega.hf_checkpoint.box_header import refuse_old, sync_folder

_STATE = "state.json"
_FILES = "files"
"""Key in the state: every other file's size in bytes, by its path within the checkpoint."""


class NoRoom(OSError):
    """The disk has no room for a checkpoint; nothing was written."""


class Checkpoints:
    """The folder `checkpoints/` of a run: `step_000010/{policy/, critic/, state.json}`, the critic where there is one.

    A checkpoint is written under a temporary name and renamed when it is complete, and tells how long its files are.

    Args:
        folder: Where they lie.
        keep: So many newest ones stay.
        say: Tells a person what is wrong with one.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None] = print) -> None:
        self.folder, self.keep, self.say = folder, keep, say

    def completed(self) -> list[Path]:
        """Checkpoints that were written to their end once, the newest last. A disk may have damaged them since."""
        return sorted(p for p in self.folder.glob("step_*") if p.suffix != ".partial")

    def newest(self) -> Path | None:
        """The newest whole checkpoint; says which newer ones are damaged, and how.

        Raises:
            UserError: There are some, and none is whole; or the newest one is an earlier version's.
        """
        damaged = []
        for checkpoint in reversed(self.completed()):
            refuse_old(checkpoint / "policy")
            damage = _damage(checkpoint)
            if damage is None:
                return checkpoint
            self.say(f"{checkpoint} is left out: {damage}")
            damaged.append(damage)
        if damaged:
            raise UserError(
                f"{self.folder}: none of its {len(damaged)} checkpoints is whole ({damaged[0]}); bring the files back, "
                "or remove the folder to begin again"
            )
        return None

    def state(self, checkpoint: Path) -> dict[str, Any]:
        """The driver's state in a checkpoint."""
        state: dict[str, Any] = json_object(checkpoint / _STATE, "take another checkpoint")
        del state[_FILES]
        return state

    def save(self, step: int, state: dict[str, Any], parts: Mapping[str, Callable[[Path], object]]) -> Path:
        """Writes a checkpoint, then removes those beyond `keep` and what an interrupted save left.

        Args:
            step: RL steps done.
            state: The driver's.
            parts: Folder of each model, and of others → what saves it there.

        Raises:
            NoRoom: The disk has less room than the last checkpoint takes.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        for old in self.folder.glob("step_*.partial"):
            shutil.rmtree(old)
        self.folder.mkdir(exist_ok=True)  # and not the run's folder: where that is gone, its disk is
        with removed_at_the_end(partial):
            partial.mkdir()
            self._check_room()
            for name, save in parts.items():
                (partial / name).mkdir()
                save(partial / name)
            with (partial / _STATE).open("w") as opened:
                json.dump({**state, _FILES: _sizes(partial)}, opened)
                opened.flush()
                os.fsync(opened.fileno())
            sync_folder(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        sync_folder(self.folder)
        for old in self.completed()[: -self.keep]:
            shutil.rmtree(old)
        return final

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
    found = (p for p in sorted(folder.glob("step_*"), reverse=True) if p.suffix != ".partial" and _damage(p) is None)
    return next(found, None)


def refuse_old_ones(folder: Path) -> None:
    """Refuses to resume from a checkpoint of an earlier version, before anything is started.

    Raises:
        UserError: the newest one in `folder` is one.
    """
    newest = max((p for p in folder.glob("step_*") if p.suffix != ".partial"), default=None)
    if newest is not None:
        refuse_old(newest / "policy")


def _sizes(checkpoint: Path) -> dict[str, int]:
    # Turns that a process has not written in time are given up, and it may still be at its file (`rollout.journal`).
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != _STATE and p.name[:7] != ".turns-")
    return {str(p.relative_to(checkpoint)): p.stat().st_size for p in files}


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None where nothing is."""
    try:
        told = parsed((checkpoint / _STATE).read_bytes())[_FILES].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_STATE} cannot be read ({type(error).__name__})"
    there = _sizes(checkpoint)
    for name, size in told:
        if name not in there:
            return f"{name} is missing"
        if there[name] != size:
            return f"{name} has {there[name]:,} bytes of {size}"
    return None
