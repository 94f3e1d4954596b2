"""How a run is asked to end early: at once, or as soon as nothing is lost.

    SIGTERM, SIGINT   at once; the next start goes back to the newest checkpoint
    SIGUSR1           soon: a step that has not touched the policy yet is abandoned, one that has is finished; then a
                      checkpoint is written. It is what Slurm's --signal should send. A second one: at once.

All of them end with exit code 75, and the same command goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal came; everything is taken down on this error's way up. Its text is the signal's name.

    It is a KeyboardInterrupt because an event loop swallows whatever else is raised in one of its callbacks.
    """


class Leaving(Stopped):
    """The signal leaves time for a checkpoint, and nothing is under way that a checkpoint would have to wait for."""


class Notice:
    """Whether the run has been asked to end soon."""

    def __init__(self) -> None:
        self.asked = False
        self._held = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGUSR1 gives this notice inside the block. Only in the main thread."""
        before = signal.signal(signal.SIGUSR1, self.give)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def give(self, number: int = signal.SIGUSR1, frame: FrameType | None = None) -> None:
        """Asks, and raises Leaving unless something is held; the second time raises Stopped."""
        name = signal.Signals(number).name
        if self.asked:
            raise Stopped(name)
        self.asked = True
        if not self._held:
            raise Leaving(name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is inside is begun only if nobody has asked, and then finished; Leaving is raised before or after it."""
        self._obey()
        with self.finishing():
            yield
        self._obey()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """What is inside is finished, also where somebody has asked."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _obey(self) -> None:
        if self.asked:
            raise Leaving(signal.SIGUSR1.name)
