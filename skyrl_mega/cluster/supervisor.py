"""The process that a user starts: it forks the driver, watches it, and ends all of it on a signal.

    SIGTERM, SIGINT, SIGHUP,  at once: a driver that looks (`channel.heeding`) is asked and has 5 s, a second signal
    SIGQUIT                   makes them 0; then all its descendants are killed. Exit code 75
    SIGUSR1                   soon: a driver that looks is asked and takes its time; for one that does not, at once. One
                              more is the same one within 5 s, and at once after that

The driver is never interrupted: nothing is raised into the calls of Ray, vLLM or torch that are under way. Whatever the
moment and the call, one line says what happened, and no process, shared memory or temporary folder is left: this
process inherits what the driver's descendants leave behind (a subreaper), and does nothing but wait. It takes signals
by sigwait, so none is lost and none interrupts it. Where this process is killed itself, the kernel kills the driver.
`driver.start` puts it to work.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from time import monotonic, sleep

from skyrl_mega.cluster import leftovers, reaper
from skyrl_mega.cluster.channel import Asked, Channel
from skyrl_mega.cluster.terminal import Terminal

STOPPED, FAULT = 75, 1
"""Exit codes. STOPPED (EX_TEMPFAIL): ended early by a signal; the same command goes on."""
GRACE_S = 5.0
"""How long a driver that looks may take to end in order."""
SAME_S = 5.0
"""For how long a second SIGUSR1 is the first one: a scheduler tells every process of a job, and some pass it on."""
GUARDS_S = 5.0
"""How long what a driver leaves that ended by itself may take, such as its guards."""
END_S = 10.0
"""How long the kernel may take to end killed processes."""


class Supervisor:
    """Watches one driver.

    Args:
        driver: Its process id.
        channel: To it.
        taken: Signals to wait for; they are blocked.
        goes_on: What a person is told when a signal has ended it.
        cleared: Called when nothing of the driver is left; see `driver.start`.
        others: `reaper.numbers` of the shared memory that was there before the driver.
    """

    def __init__(
        self,
        driver: int,
        channel: Channel,
        taken: set[signal.Signals],
        goes_on: str,
        cleared: Callable[[], None],
        others: set[int],
    ) -> None:
        self.driver, self.channel, self.taken, self.goes_on, self.cleared = driver, channel, taken, goes_on, cleared
        self.terminal, self.others = Terminal(driver), others
        self.by: str | None = None
        """The signal that ends it."""
        self.asked_s: float | None = None
        """When it was asked to end soon."""
        self.deadline: float | None = None
        """When a driver that was asked to end at once is killed."""
        self.status: int | None = None
        """The driver's, once it has ended."""

    def run(self) -> int:
        """Returns with the driver's end, when nothing of it is left; the exit code."""
        while self.status is None:
            number = _wait(self.taken, self.deadline)
            if number is None:
                break
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGTSTP:
                self.terminal.suspend()
            else:
                self._signalled(signal.Signals(number))
        killed = self.status is None or os.WIFSIGNALED(self.status)
        clear(0.0 if killed else GUARDS_S, self._reap, self.others)
        for path in self.channel.left():
            try:
                leftovers.remove(path)
            except OSError as error:
                _say(f"{path} is left: {error}")
        self.cleared()
        self.terminal.restore(killed)
        return self._code()

    def _signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR1 and self.asked_s is not None and monotonic() < self.asked_s + SAME_S:
            return
        if number == signal.SIGUSR1 and self.by is None and self.channel.heeded:
            self.by, self.asked_s = number.name, monotonic()
            self.channel.ask(Asked.SOON, number)
            return
        if self.deadline is not None and number != signal.SIGINT:
            return  # a scheduler tells every process of a job, and our own parent tells this one once more
        grace = GRACE_S if self.channel.heeded and self.deadline is None else 0.0
        if self.deadline is None:
            self.by = number.name
        self.deadline = monotonic() + grace
        self.channel.ask(Asked.NOW, number)

    def _reap(self) -> None:
        """Takes note of what became of the driver, and of those that it left to this process."""
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
        """The exit code, said in a line where the driver could not say anything."""
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        if self.deadline is not None or (self.by and code == STOPPED):
            _say(f"stopped by {self.by}; {self.goes_on}")
            return STOPPED
        assert code is not None
        if code >= 0 and code == self.channel.finished:
            return code
        if code < 0:
            why = ", perhaps by the kernel for want of memory" if code == -signal.SIGKILL else ""
            how = f"was ended by {_name(-code)}{self.channel.doing()}{why}"
        elif self.channel.finished is None:
            how = (
                f"ended with exit status {code} before it had finished{self.channel.doing()}: an environment, or other "
            )
            how += "code in it, called os._exit or exit"
        else:
            how = f"had finished with exit code {self.channel.finished} and then ended with exit status {code}"
        _say(f"fault: the driver (process {self.driver}) {how}; {self.goes_on}")
        return FAULT


def clear(patience_s: float, reap: Callable[[], None], others: set[int]) -> None:
    """Ends all descendants of this process, a subreaper, and removes the shared memory that only they had.

    Args:
        patience_s: Seconds that they may take to end by themselves.
        reap: Waits for children that have ended.
        others: `reaper.numbers` of the shared memory that was there before them.
    """
    deadline = monotonic() + patience_s
    while descendants() and monotonic() < deadline:
        reap()
        sleep(0.02)
    stopped: set[int] = set()
    while new := descendants() - stopped:  # stopped first: then none of them makes anything any more
        _send(new, signal.SIGSTOP)
        stopped |= new
    names = reaper.shared_memory(list(stopped))
    deadline = monotonic() + END_S
    while (left := descendants()) and monotonic() < deadline:
        _send(left, signal.SIGKILL)
        reap()
        sleep(0.02)
    reap()
    reaper.unlink(names, others)


def descendants() -> set[int]:
    """Processes below this one that nobody has waited for. One that was killed may look dead, a zombie, while some of
    its threads still hold its ports and its memory; this process waits for all of them in the end."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
    found, wave = set(), {os.getpid()}
    while wave := {pid for pid, parent in parents.items() if parent in wave}:
        found |= wave
    return found


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:  # it ended meanwhile, or is another user's
            continue


def _wait(taken: set[signal.Signals], deadline: float | None) -> int | None:
    """The next signal; None where the deadline comes first."""
    if deadline is None:
        return signal.sigwait(taken)
    came = signal.sigtimedwait(taken, max(0.0, deadline - monotonic()))
    return None if came is None else came.si_signo


def _say(line: str) -> None:
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:  # nobody reads
        return


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
