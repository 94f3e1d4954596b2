"""Hugging Face directories of successive weight versions, for engines that load nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from skyrl_mega.hf_checkpoint.load import exported

KEPT = 2
"""Directories kept: the latest, and the one before, which an engine may still read."""
_NAME = re.compile(r"version-\d{9}")


class VersionDirectories:
    """The directories of a run, named `version-000000012`.

    Args:
        folder: Folder of the directories, readable on every node.
        export: Writes the policy's present weights as a Hugging Face directory.
    """

    def __init__(self, folder: Path, export: Callable[[Path], None]) -> None:
        self.folder, self._export = folder, export
        self._latest = -1

    def __call__(self, version: int) -> Path:
        """Returns the directory of weight version `version`, with the policy's present weights, written unless written
        by the previous call. After writing, removes all but the last `KEPT` directories.

        Raises:
            UserError, ActorFailed: As in `megatron.group.TrainGroup.export`.
            OSError: A directory cannot be listed or removed.
        """
        path = self.folder / f"version-{version:09d}"
        if version != self._latest:
            self._export(path)
            self._latest = version
            self._remove_old(path)
        return path

    def _remove_old(self, latest: Path) -> None:
        """Removes older directories whose files are exactly those of an export."""
        found = [folder for folder in self.folder.iterdir() if _NAME.fullmatch(folder.name) and folder != latest]
        earlier = sorted(folder for folder in found if folder.name < latest.name)
        for folder in found:
            if folder not in earlier[-(KEPT - 1) :] and exported(folder, {entry.name for entry in folder.iterdir()}):
                shutil.rmtree(folder)
