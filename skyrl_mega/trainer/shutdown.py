"""Early end of a run: immediate, or graceful with a checkpoint.

    SIGTERM, SIGINT   immediate; the next start resumes from the newest checkpoint
    SIGUSR1           graceful: abandons a step before the first policy update, finishes a later step, then writes a
                      checkpoint. Slurm's --signal should send this. A second SIGUSR1 after 5 s or more: immediate.

The exit code is 75, and the same command resumes the run. The supervisor (`cluster.supervisor`) receives the signals.
The run polls for requests between calls, and twice per second during generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_mega.cluster import channel
from skyrl_mega.cluster.channel import StopRequest


class Stopped(BaseException):
    """A signal demands the end of the run. Not an Exception, to pass through error handlers."""


class GracefulStop(Stopped):
    """A graceful end was requested, and no unfinished work stands in the way of a checkpoint."""


def ending_signal(error: BaseException) -> str:
    """Returns the name of the signal that ended the run, such as SIGTERM; empty if the run failed by itself.

    After a request for an immediate stop every error counts as a consequence of the signal.
    """
    at_once = channel.asked() is StopRequest.NOW  # any later failure is a consequence of the immediate stop
    return channel.stop_signal() if at_once or isinstance(error, Stopped) else ""


class ShutdownRequest:
    """The request to end the run, if there is a request.

    Args:
        asked: Function that returns the present request; by default the supervisor's.
    """

    def __init__(self, asked: Callable[[], StopRequest] = channel.asked) -> None:
        self._asked = asked
        self._finishing = False

    def raise_if_requested(self) -> None:
        """Raises Stopped after a request for an immediate end, or GracefulStop after a request for a graceful end,
        except inside `finish`. Does nothing without a request."""
        asked = self._asked()
        if asked is StopRequest.NOW:
            raise Stopped
        if asked is StopRequest.SOON and not self._finishing:
            raise GracefulStop

    @property
    def at_once(self) -> bool:
        """True after a request for an immediate end; any later failure is a consequence."""
        return self._asked() is StopRequest.NOW

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Delays a graceful end until after the body of the `with` block.

        Before the body, and after a body without an error, raises Stopped after a request for an immediate end, and
        GracefulStop after a request for a graceful end. Inside the body, `raise_if_requested` raises only Stopped. An
        error of the body passes unchanged.
        """
        self.raise_if_requested()
        with self.finish():
            yield
        self.raise_if_requested()

    @contextmanager
    def finish(self) -> Iterator[None]:
        """Ignores a request for a graceful end inside the `with` block, and raises nothing after the block. After a
        request for an immediate end, `raise_if_requested` raises Stopped inside the block, too."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
