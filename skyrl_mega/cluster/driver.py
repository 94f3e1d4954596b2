"""Start of a long command: the process forks a driver and stays behind as supervisor (see `supervisor`)."""

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
"""Wanted limit of open files of the driver, and of a server for agents."""


def start(resume_hint: str, on_cleared: Callable[[], None] = lambda: None) -> None:
    """Forks this process and returns None in the new process, the driver, only. The current process becomes the
    supervisor: it never returns, and exits after the driver. Must be called before heavy imports and before any thread
    starts.

    Args:
        resume_hint: Message for the user after the command was ended by a signal, or the driver died.
        on_cleared: Called by the supervisor at the end, when no process of the driver is left.

    Raises:
        OSError: The system allows no further process, or refuses a setting of the process (prctl).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may have set SIG_IGN, which would hide the driver's end
    # Block signals before anything else, so that none is lost. The supervisor gets SIGTTOU when it changes the
    # foreground.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_TAKEN, signal.SIGTTOU})
    from skyrl_mega.cluster import channel, reaper, user

    user.set_user_variables()
    shared_memory, existing_shm, supervisor = channel.Channel(), reaper.shared_memory_inodes(), os.getpid()
    _prctl(_SUBREAPER, 1)
    driver = os.fork()
    if driver:
        from skyrl_mega.cluster.supervisor import Supervisor

        ignored = {number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN}  # nohup
        os._exit(Supervisor(driver, shared_memory, _TAKEN - ignored, resume_hint, on_cleared, existing_shm).run())
    os.setpgid(0, 0)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != supervisor:  # the supervisor was killed in the meantime
        os._exit(1)

    def pass_on(number: int, _: object) -> None:
        """Passes Ctrl-C to the supervisor while the driver is in the foreground, as in a debugger."""
        os.kill(supervisor, number)

    signal.signal(signal.SIGINT, pass_on)
    for number in (
        signal.SIGTERM,
        signal.SIGQUIT,
        signal.SIGUSR1,
    ):  # some Slurm sites signal every process of a job
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    allow_open_files()
    channel.join(shared_memory)


def run(command: Callable[[], int]) -> NoReturn:
    """Runs a command, reports its return value to the supervisor as exit code (1 after an exception), and exits with
    this code. Lets an exception of the command through.

    A process with any other end counts as unfinished, regardless of the exit status.
    """
    code = 1
    try:
        code = command()
    finally:
        from skyrl_mega.cluster import channel

        channel.finish(code)
    sys.exit(code)


def allow_open_files() -> None:
    """Raises the process's limit of open files to `OPEN_FILES`, as far as the hard limit allows: the sessions of a
    step, and the connections of agents, each hold some files.

    The usual soft limit is 1,024, although the hard limit is higher.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def _ignore(number: int, _: object) -> None:
    """Ignores a signal also received by the supervisor. SIG_IGN would be inherited by child processes."""


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
