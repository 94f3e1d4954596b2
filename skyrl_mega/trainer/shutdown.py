"""How a run ends early: at once, or as soon as nothing is lost.

    SIGTERM, SIGINT   at once; the next start goes back to the newest checkpoint
    SIGUSR1           soon: a step that has not touched the policy yet is abandoned, one that has is finished; then a
                      checkpoint is written. It is what Slurm's --signal should send. A second one at least 5 s later:
                      at once.

All of them end with exit code 75, and the same command goes on. Signals are the supervisor's (`cluster.supervisor`): it
asks, and the run looks for that between its calls, and twice a second while it generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_mega.cluster import channel
from skyrl_mega.cluster.channel import Asked


class Stopped(BaseException):
    """A signal came; everything is taken down on its way up. No Exception, as none of those who survive errors is
    to survive it."""


class GracefulStop(Stopped):
    """There is time for a checkpoint, and nothing is under way that a checkpoint would have to wait for."""


def ended_by(error: BaseException) -> str:
    """The signal that something has ended for, such as SIGTERM; nothing where it has failed."""
    at_once = channel.asked() is Asked.NOW  # whatever fails from then on follows from that
    return channel.signalled() if at_once or isinstance(error, Stopped) else ""


class ShutdownRequest:
    """Whether the run has been asked to end.

    Args:
        asked: Tells what is asked by now.
    """

    def __init__(self, asked: Callable[[], Asked] = channel.asked) -> None:
        self._asked = asked
        self._finishing = False

    def look(self) -> None:
        """Raises Stopped where that is asked, and GracefulStop unless something is being finished."""
        asked = self._asked()
        if asked is Asked.NOW:
            raise Stopped
        if asked is Asked.SOON and not self._finishing:
            raise GracefulStop

    @property
    def at_once(self) -> bool:
        """Whether it is to end without finishing anything: whatever fails from then on follows from that."""
        return self._asked() is Asked.NOW

    @contextmanager
    def defer(self) -> Iterator[None]:
        """What is inside is begun only if no signal has come, and then finished.

        GracefulStop is raised before or after it.
        """
        self.look()
        with self.finish():
            yield
        self.look()

    @contextmanager
    def finish(self) -> Iterator[None]:
        """What is inside is finished, also where a signal has come; but not where it is to end at once."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
