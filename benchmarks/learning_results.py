"""Results of `benchmarks.learning_table`: a file with a line per row and seed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError

Figures = dict[str, Any]


class Results:
    """Figures of rows and seeds, written to disk at once.

    Args:
        file: A JSON file, created if missing.
        settings: Settings shared by all rows. Figures of other settings are refused.

    Raises:
        UserError: The file contains figures of other settings.
    """

    def __init__(self, file: Path, settings: list[str]) -> None:
        self.file, self.settings = file, settings
        saved = json.loads(file.read_text()) if file.exists() else {"settings": settings, "start": None, "rows": {}}
        if saved["settings"] != settings:
            other = sorted(set(saved["settings"]) ^ set(settings))
            raise UserError(f"{file}: it was measured with other settings ({', '.join(other)}); move it away first")
        self.start: Figures | None = saved["start"]
        """Scores before training."""
        self._rows: dict[str, dict[str, Figures]] = saved["rows"]

    def has(self, row: str, seed: int) -> bool:
        """Returns True if a row was trained with this seed."""
        return str(seed) in self._rows.get(row, {})

    def of(self, row: str, seed: int) -> Figures:
        """Returns the figures of a row and seed."""
        return self._rows[row][str(seed)]

    def seeds(self, row: str) -> list[int]:
        """Returns the seeds of a row."""
        return sorted(int(seed) for seed in self._rows.get(row, {}))

    def keep(self, row: str, seed: int, figures: Figures) -> None:
        """Writes the figures of a row."""
        self._rows.setdefault(row, {})[str(seed)] = figures
        self._write()

    def begin_with(self, start: Figures) -> None:
        """Writes the scores before training, or compares with the saved scores.

        Raises:
            UserError: The scores differ: new measurements would start at other weights.
        """
        if self.start is not None and self.start != start:
            raise UserError(
                f"{self.file}: it was measured from a start with {json.dumps(self.start)}, and this one has "
                f"{json.dumps(start)}: rows cannot be compared; move the file away, and measure all of them"
            )
        self.start = start
        self._write()

    def _write(self) -> None:
        rows = ",\n".join(
            f"  {json.dumps(name)}: {_lines(figures_by_seed)}" for name, figures_by_seed in self._rows.items()
        )
        settings, start = json.dumps(self.settings), json.dumps(self.start)
        partial = self.file.with_suffix(".partial")
        partial.write_text(f'{{\n "settings": {settings},\n "start": {start},\n "rows": {{\n{rows}\n }}\n}}\n')
        os.replace(partial, self.file)


def _lines(by_seed: dict[str, Figures]) -> str:
    lines = ",\n".join(f'   "{seed}": {json.dumps(by_seed[seed])}' for seed in sorted(by_seed, key=int))
    return f"{{\n{lines}\n  }}"
