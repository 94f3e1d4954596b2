"""A run's checkpoints on disk: written whole or not at all, the newest whole one found, the last few kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATE = "state.json"


class Checkpoints:
    """The folder `checkpoints/` of a run: `step_000010/{policy/, state.json}`.

    A checkpoint is written under a temporary name and renamed when it is complete, so a folder called `step_…` is
    whole.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def whole(self) -> list[Path]:
        """The whole checkpoints, the newest last."""
        found = [p.parent for p in self.folder.glob(f"step_*/{_STATE}") if not p.parent.name.endswith(".partial")]
        return sorted(found)

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        return max(self.whole(), default=None)

    def state(self, checkpoint: Path) -> dict[str, Any]:
        """The driver's state in a checkpoint."""
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
        return state

    def save(self, step: int, state: dict[str, Any], save_policy: Callable[[Path], None]) -> Path:
        """Writes a checkpoint, then removes those beyond `keep` and what an interrupted save left."""
        final = self.folder / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        for old in self.folder.glob("step_*.partial"):
            shutil.rmtree(old)
        (partial / "policy").mkdir(parents=True)
        save_policy(partial / "policy")
        (partial / _STATE).write_text(json.dumps(state))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        for old in self.whole()[: -self.keep]:
            shutil.rmtree(old)
        return final
