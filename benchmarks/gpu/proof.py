"""What a proof is, and what it says while it goes: figures, statements that hold or not, parts left out."""

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
    """One entry of the catalogue."""

    name: str
    about: str
    """A line for `--list`."""
    entry: str
    """`module:function`; the function takes a `Bench`."""
    seconds: float
    """That it should take on an H100."""
    limit_s: float
    """After which it is killed."""
    stage: int = 1
    """1: torch alone; 2: with Transformer Engine; 3: with vLLM. What stages 2 and 3 need may be absent."""
    needs: tuple[str, ...] = ()
    """Modules that must be there."""
    makes: str = ""
    """A module that it installs where it is absent, of files that were brought; when that is gone it runs again."""
    compiles: str = ""
    """A package that it compiles first where that was brought as source, in `compile_s` more seconds."""
    compile_s: float = 0.0


class Bench:
    """A proof's process: where it computes, how large, and where its figures go.

    Every call of `figure`, `holds` and `left_out` is on disk when it returns.
    """

    def __init__(self, events: Path, folder: Path, *, tiny: bool) -> None:
        self.tiny, self.folder = tiny, folder
        self.cuda = not tiny
        self._events = events

    @cached_property
    def device(self) -> torch.device:
        """Where the proof computes."""
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
        """A measurement.

        Args:
            limit: What the same machine can do, measured in the same process (`limit_of` says how); the result keeps
                `value / limit`.
            at_most, at_least: Bounds; outside them the proof has failed.
        """
        told: dict[str, Any] = {"name": name, "value": value, "unit": unit}
        if limit is not None:
            told |= {"limit": limit, "limit_of": limit_of, "ratio": value / limit if limit else None}
        for key, bound in (("at_most", at_most), ("at_least", at_least)):
            if bound is not None:
                told[key] = bound
        self._tell("figure", told)
        if at_most is not None and not value <= at_most:
            self._tell("wrong", f"{name}: {value:.6g} {unit}, at most {at_most:.6g} is allowed")
        if at_least is not None and not value >= at_least:
            self._tell("wrong", f"{name}: {value:.6g} {unit}, at least {at_least:.6g} is needed")

    def holds(self, what: str, true: bool, seen: object = "") -> None:
        """A statement; the proof goes on where it does not hold, and has failed at its end."""
        if true:
            self._tell("held", what)
        else:
            self._tell("wrong", f"not so: {what}" + (f"; seen: {seen}" if str(seen) else ""))

    def note(self, name: str, value: object) -> None:
        """A fact that is neither good nor bad."""
        self._tell("note", {"name": name, "value": value})

    def left_out(self, what: str) -> None:
        """A part that this machine cannot do."""
        self._tell("left out", what)

    def _tell(self, kind: str, value: object) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    # ---- measuring -----------------------------------------------------------------------------------------------

    def synchronise(self) -> None:
        """Waits until the device has nothing to do."""
        if self.cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int = 5, warm: int = 1) -> float:
        """Median of the time that `work` takes, the device's included."""
        for _ in range(warm):
            work()
        found = []
        for _ in range(repeats):
            self.synchronise()
            start = time.perf_counter()
            work()
            self.synchronise()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes of tensors that exist at most while `work` runs; 0 on a CPU, where torch does not count them."""
        if not self.cuda:
            work()
            return 0
        import torch

        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronise()
        return torch.cuda.max_memory_allocated(self.device)
