"""The process started by the user: forks and watches the driver, and ends all of the driver's processes on a signal.

    SIGTERM, SIGINT, SIGHUP,  now: a driver that polls for requests is asked and gets 5 s; a second SIGINT ends this
    SIGQUIT                   delay; then all descendants are killed. Exit code 75
    SIGUSR1                   soon: a driver that polls is asked and takes as long as needed; any other driver is ended
                              now. A second SIGUSR1 within 5 s is ignored; later, it means now

For polling see `channel.polling_for_stop`. The driver is never interrupted: no exception is raised into running calls
of Ray, vLLM or torch. At any moment and in any call, a line reports the event, and no process, shared memory or
temporary folder is left behind. For this, the supervisor adopts orphaned descendants of the driver (as a subreaper) and
does nothing except wait. Signals are taken with sigwait, so none is lost and none interrupts a call. If the supervisor
itself is killed, the kernel kills the driver. Started by `driver.start`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from time import monotonic, sleep

from skyrl_mega.cluster import reaper, temporary_files
from skyrl_mega.cluster.channel import Channel, StopRequest
from skyrl_mega.cluster.terminal import Terminal

STOPPED, FAULT = 75, 1
"""Exit codes. STOPPED (EX_TEMPFAIL): ended early by a signal; the same command resumes the run."""
GRACE_S = 5.0
"""Seconds for an orderly end of a driver that polls for requests."""
SAME_S = 5.0
"""Seconds during which a second SIGUSR1 is a duplicate: a scheduler signals every process of a job, and some forward
signals."""
GUARDS_S = 5.0
"""Seconds until processes left by a normally ended driver, such as guards, must be gone."""
END_S = 10.0
"""Time limit in seconds for the kernel to end killed processes."""
CLEANER = "skyrl-cleaner"
"""Process name of a descendant that removes what its owner has left outside of processes, such as containers."""
CLEANERS_S = 60.0
"""Seconds for the cleaners after the end of all other processes of a killed driver."""


class Supervisor:
    """Watches a driver.

    Args:
        driver: Process id of the driver.
        channel: Shared memory with the driver.
        signals: Blocked signals to wait for.
        resume_hint: Message for the user after the command was ended by a signal.
        on_cleared: Called when no process of the driver is left; see `driver.start`.
        existing_shm: `reaper.shared_memory_inodes` of the shared memory from before the driver.
    """

    def __init__(
        self,
        driver: int,
        channel: Channel,
        signals: set[signal.Signals],
        resume_hint: str,
        on_cleared: Callable[[], None],
        existing_shm: set[int],
    ) -> None:
        self.driver, self.channel, self.signals, self.resume_hint, self.on_cleared = (
            driver,
            channel,
            signals,
            resume_hint,
            on_cleared,
        )
        self.terminal, self.existing_shm = Terminal(driver), existing_shm
        self.ended_by: str | None = None
        """Name of the signal that ends the driver."""
        self.asked_at: float | None = None
        """Time at which the driver was asked to end soon."""
        self.deadline: float | None = None
        """Time at which a driver asked to end now is killed."""
        self.status: int | None = None
        """Wait status of the driver after its end."""

    def run(self) -> int:
        """Waits until the driver and all of its processes are gone, passing on or acting on signals meanwhile, removes
        what the driver left and returns the exit code: the driver's, `STOPPED` after a signal, or `FAULT`."""
        while self.status is None:
            number = _wait(self.signals, self.deadline)
            if number is None:
                break
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGTSTP:
                self.terminal.suspend()
            else:
                self._signalled(signal.Signals(number))
        killed = self.status is None or os.WIFSIGNALED(self.status)
        clear(0.0 if killed else GUARDS_S, CLEANERS_S if killed else 0.0, self._reap, self.existing_shm)
        for path in self.channel.unremoved_paths():
            try:
                temporary_files.remove(path)
            except OSError as error:
                _say(f"{path} could not be removed: {error}")
        self.on_cleared()
        self.terminal.restore(killed)
        return self._code()

    def _signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1 and self.asked_at is not None and monotonic() < self.asked_at + SAME_S:
            return
        if number == signal.SIGUSR1 and self.ended_by is None and self.channel.polled:
            self.ended_by, self.asked_at = number.name, monotonic()
            self.channel.ask(StopRequest.SOON, number)
            return
        if self.deadline is not None and number != signal.SIGINT:
            return  # a scheduler signals every process of a job, and our parent forwards the signal again
        grace = GRACE_S if self.channel.polled and self.deadline is None else 0.0
        if self.deadline is None:
            self.ended_by = number.name
        self.deadline = monotonic() + grace
        self.channel.ask(StopRequest.NOW, number)

    def _reap(self) -> None:
        """Records the driver's exit status or stop, and reaps adopted processes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid != self.driver:
                continue
            if not os.WIFSTOPPED(status):
                self.status = status
            elif self.deadline is None:
                self.terminal.suspended(os.WSTOPSIG(status))

    def _code(self) -> int:
        """Returns the exit code; prints the reason if the driver could not."""
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        if self.deadline is not None or (self.ended_by and code == STOPPED):
            _say(f"stopped by {self.ended_by}; {self.resume_hint}")
            return STOPPED
        assert code is not None
        if code >= 0 and code == self.channel.exit_code:
            return code
        if code < 0:
            why = ", perhaps by the kernel, out of memory" if code == -signal.SIGKILL else ""
            event = f"was ended by {_name(-code)}{self.channel.doing()}{why}"
        elif self.channel.exit_code is None:
            event = (
                f"ended with exit status {code} before it had finished{self.channel.doing()}: an environment, or other "
            )
            event += "code in it, called os._exit or exit"
        else:
            event = f"had finished with exit code {self.channel.exit_code} and then ended with exit status {code}"
        _say(f"fault: the driver (process {self.driver}) {event}; {self.resume_hint}")
        return FAULT


def clear(patience_s: float, cleaners_s: float, reap: Callable[[], None], existing_shm: set[int]) -> None:
    """Waits for all descendants of this process, a subreaper, to end, kills the rest, and removes shared memory that
    only the killed processes mapped. Returns at most `END_S` + `cleaners_s` seconds after the first kill, even if
    processes remain.

    Args:
        patience_s: Seconds to wait before the rest is killed.
        cleaners_s: Seconds for processes named `CLEANER`, and for their children, before these are killed too.
        reap: Reaps ended children.
        existing_shm: `reaper.shared_memory_inodes` of the shared memory from before the descendants.
    """
    deadline = monotonic() + patience_s
    while descendants() and monotonic() < deadline:
        reap()
        sleep(0.02)
    spared = cleaners if cleaners_s else set
    stopped: set[int] = set()
    while new := descendants() - spared() - stopped:  # stop all before killing, so that none can create anything new
        _send(new, signal.SIGSTOP)
        stopped |= new
    names = reaper.shared_memory(list(stopped))
    deadline = monotonic() + END_S
    while (alive := descendants() - spared()) and monotonic() < deadline:
        _send(alive, signal.SIGKILL)
        reap()
        sleep(0.02)
    _await_cleaners(cleaners_s, reap)
    reap()
    reaper.unlink(names, existing_shm)


def _await_cleaners(seconds: float, reap: Callable[[], None]) -> None:
    """Waits for the cleaners to end, and kills all descendants afterwards."""
    if seconds and cleaners():
        _say(f"removing containers, for at most {seconds:.0f} s")
        deadline = monotonic() + seconds
        while cleaners() and monotonic() < deadline:
            reap()
            sleep(0.1)
        _send(descendants(), signal.SIGKILL)


def cleaners() -> set[int]:
    """Returns the ids of the descendants named `CLEANER`, and of all their descendants."""
    named = set()
    for pid in descendants():
        try:
            with open(f"/proc/{pid}/comm") as name:
                named |= {pid} if name.read().strip() == CLEANER else set()
        except OSError:  # ended in the meantime
            continue
    return named | _below(named)


def descendants() -> set[int]:
    """Returns the ids of all descendants of this process, including zombies not yet reaped.

    A killed process may look like a zombie while some threads still hold ports and memory; this process reaps all
    descendants in the end.
    """
    return _below({os.getpid()})


def _below(ancestors: set[int]) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:  # ended in the meantime
            continue
    result, wave = set(), set(ancestors)
    while wave := {pid for pid, parent in parents.items() if parent in wave}:
        result |= wave
    return result


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:  # ended in the meantime, or owned by another user
            continue


def _wait(signals: set[signal.Signals], deadline: float | None) -> int | None:
    """Returns the next signal, or None if the deadline comes first."""
    if deadline is None:
        return signal.sigwait(signals)
    received = signal.sigtimedwait(signals, max(0.0, deadline - monotonic()))
    return None if received is None else received.si_signo


def _say(line: str) -> None:
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:  # no reader
        return


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
