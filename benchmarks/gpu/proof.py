"""A proof and the output: figures, statements that hold or fail, and parts left out."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Proof:
    """An entry of the catalogue."""

    name: str
    about: str
    """Description of the proof, a line of `--list`."""
    entry: str
    """`module:function`; the function takes a `Bench`."""
    seconds: float
    """Expected duration on an H100 or H200."""
    limit_s: float
    """Time limit; a longer proof is killed."""
    stage: int = 1
    """1: torch alone; 2: with Transformer Engine; 3: with vLLM. The packages of stages 2 and 3 may be absent."""
    needs: tuple[str, ...] = ()
    """Required modules."""
    makes: str = ""
    """Module installed by the proof from prepared files if absent. The proof runs again if the module disappears."""
    compiles: str = ""
    """Package compiled first if prepared as source, in `compile_s` more seconds."""
    compile_s: float = 0.0


class Bench:
    """Interface of a proof's process: device, size, and output of figures.

    Every call of `figure`, `holds` and `left_out` is on disk when the call returns.
    """

    def __init__(self, events: Path, folder: Path, *, tiny: bool) -> None:
        self.tiny, self.folder = tiny, folder
        self.cuda = not tiny
        self._events = events

    @cached_property
    def device(self) -> torch.device:
        """Device of the proof's computations."""
        import torch

        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    # ---- what is told --------------------------------------------------------------------------------------------

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        limit_of: str = "",
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Records a measurement.

        Args:
            limit: Limit of the same machine, measured in the same process (`limit_of` names the method). The result
                keeps `value / limit`.
            at_most, at_least: Bounds; the proof fails if the value lies outside.
        """
        entry: dict[str, Any] = {"name": name, "value": value, "unit": unit}
        if limit is not None:
            entry |= {"limit": limit, "limit_of": limit_of, "ratio": value / limit if limit else None}
        for key, bound in (("at_most", at_most), ("at_least", at_least)):
            if bound is not None:
                entry[key] = bound
        self._append("figure", entry)
        if at_most is not None and not value <= at_most:
            self._append("wrong", f"{name}: {value:.6g} {unit}, at most {at_most:.6g} is allowed")
        if at_least is not None and not value >= at_least:
            self._append("wrong", f"{name}: {value:.6g} {unit}, at least {at_least:.6g} is needed")

    def holds(self, what: str, true: bool, seen: object = "") -> None:
        """Records a statement. After a false statement the proof continues and fails at the end."""
        if true:
            self._append("held", what)
        else:
            self._append("wrong", f"not so: {what}" + (f"; seen: {seen}" if str(seen) else ""))

    def note(self, name: str, value: object) -> None:
        """Records a neutral fact."""
        self._append("note", {"name": name, "value": value})

    def left_out(self, what: str) -> None:
        """Records a part that this machine cannot run."""
        self._append("left out", what)

    def _append(self, kind: str, value: object) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    # ---- measuring -----------------------------------------------------------------------------------------------

    def synchronise(self) -> None:
        """Waits until the device is idle."""
        if self.cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 5, warm: int = 1) -> float:
        """Returns the median duration of `work`, device time included."""
        for _ in range(warm):
            work()
        durations = []
        for _ in range(repeats):
            self.synchronise()
            start = time.perf_counter()
            work()
            self.synchronise()
            durations.append(time.perf_counter() - start)
        return statistics.median(durations)

    def peak(self, work: Callable[[], object]) -> int:
        """Returns the peak bytes of tensors while `work` runs; 0 on a CPU, because torch does not count there."""
        if not self.cuda:
            work()
            return 0
        import torch

        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronise()
        return torch.cuda.max_memory_allocated(self.device)
