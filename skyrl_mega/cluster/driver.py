"""The start of a long command: a supervisor stays behind, and the driver goes on (`supervisor`)."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
_TAKEN = {*_ENDING, signal.SIGCHLD, signal.SIGTSTP}
_SUBREAPER, _DEATH_SIGNAL = 36, 1
"""PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG."""
OPEN_FILES = 65536


def start(goes_on: str, cleared: Callable[[], None] = lambda: None) -> None:
    """Returns in a new process, the driver; the present one becomes its supervisor, and exits when it has ended.

    To be called before anything heavy is imported, and before there are threads.

    Args:
        goes_on: What a person is told when a signal has ended it.
        cleared: Called by the supervisor at the end, when no process of the driver is left.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have left it ignored: then nobody would tell of an end
    # First of all: from here on no signal is lost. SIGTTOU would come where the supervisor changes the foreground.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_TAKEN, signal.SIGTTOU})
    from skyrl_mega.cluster import channel, reaper, user

    user.name_user()
    shared, others, supervisor = channel.Channel(), reaper.numbers(), os.getpid()
    _prctl(_SUBREAPER, 1)
    driver = os.fork()
    if driver:
        from skyrl_mega.cluster.supervisor import Supervisor

        ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}  # nohup
        os._exit(Supervisor(driver, shared, _TAKEN - ignored, goes_on, cleared, others).run())
    os.setpgid(0, 0)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != supervisor:  # it was killed meanwhile
        os._exit(1)

    def pass_on(number: int, _: object) -> None:
        """Ctrl-C where the driver has the foreground, as in a debugger."""
        os.kill(supervisor, number)

    signal.signal(signal.SIGINT, pass_on)
    for number in (
        signal.SIGTERM,
        signal.SIGQUIT,
        signal.SIGUSR1,
    ):  # some sites' Slurm sends them to every process of a job
        signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _raise_open_files()
    channel.join(shared)


def run(command: Callable[[], int]) -> NoReturn:
    """Runs a command, says to the supervisor with which exit code it has finished, and exits with it.

    A process that ends in any other way has not finished, whatever its exit status is.
    """
    code = 1
    try:
        code = command()
    finally:
        from skyrl_mega.cluster import channel

        channel.finish(code)
    sys.exit(code)


def _raise_open_files() -> None:
    """Sessions of a step hold some files each, all at once; the usual limit is 1,024, though more is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _nothing(number: int, _: object) -> None:
    """The supervisor has it too. Not SIG_IGN, which children would inherit."""


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
