"""For stores that cannot remove what they hold: the id of the run there, and which steps it has been given."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class OnceLog:
    """Lets every step of a run pass once, however often the run is killed and resumed.

    A resumed run repeats the steps after its checkpoint. A store that only appends would show them twice, so they are
    left out until the run passes the last step that the store has been given. A step counts as given before it is
    sent, until sending it fails: a kill in between leaves the step out and never doubles it.

    Args:
        file: Where id and step are kept between processes (JSON).
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._run_id = ""
        self._last = -1

    def resume(self, resumed_step: int | None) -> str | None:
        """The id of the store's run that this run continues; None where a new one is to be made."""
        if resumed_step is None or not self._file.is_file():
            return None
        kept: dict[str, Any] = json.loads(self._file.read_text())
        self._run_id, self._last = str(kept["run_id"]), int(kept["last_step"])
        return self._run_id

    def begin(self, run_id: str) -> None:
        """A new run of the store, which has no step yet."""
        self._run_id = run_id
        self._keep(-1)

    def __contains__(self, step: int) -> bool:
        """Whether the store has been given this step."""
        return step <= self._last

    @contextmanager
    def giving(self, step: int) -> Iterator[None]:
        """The step is sent to the store; an exception takes it back."""
        before = self._last
        self._keep(step)
        try:
            yield
        except BaseException:
            self._keep(before)
            raise

    def left_out(self, resumed_step: int | None) -> str:
        """Which steps will be repeated and left out, for the user; empty where there are none."""
        first = (resumed_step or 0) + 1
        if self._last < first:
            return ""
        return f"; steps {first} to {self._last} are repeated now, and not written there again"

    def _keep(self, step: int) -> None:
        self._last = step
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({"run_id": self._run_id, "last_step": step}))
        os.replace(partial, self._file)
