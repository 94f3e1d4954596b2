"""A small process that removes the containers of another process after that process has ended, even by SIGKILL.

    python -I -S reaper.py '{"owner": 4711, "list": ["podman", "ps", …], "remove": ["podman", "rm", …]}'

Prints the id of the process that stays. `list` prints the name of a container per line, and `remove` takes the names as
further arguments. The owner holds the write end of the reaper's standard input: end of file means that the owner has
ended. A forked child may hold this end too, so the reaper watches the owner itself as well. Uses the standard library
only, to start in 20 ms.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

CLEANER = "skyrl-cleaner"
"""Name of this process, by which a supervisor spares it (`cluster.supervisor.CLEANER`)."""
ROUND_S = 1.0
"""Seconds between two rounds of removals."""
QUIET_S = 15.0
"""Seconds without a container, and without a client that starts one, after which the reaper ends. A daemon may still
create a container after the end of its client."""
LONGEST_S = 600.0
"""Seconds after the owner's end at which the reaper gives up; containers then end by their lifetime."""
COMMAND_S = 60.0
"""Time limit of a listing in seconds."""
AT_ONCE = 20
"""Maximum number of containers in a removal."""


def wait_for(owner: int) -> None:
    """Waits, without a time limit, for the end of the process with the id `owner`, or for end of file on standard
    input; returns at once if the process has ended."""
    with contextlib.suppress(ProcessLookupError):  # already gone
        select.select([0, os.pidfd_open(owner)], [], [])


def output_of(argv: list[str], timeout_s: float = COMMAND_S) -> list[str] | None:
    """Returns the words printed by the command `argv`, split at white space; [] if it prints nothing, None if it fails
    or takes longer than `timeout_s` seconds."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").split()


def runs_with(argument: str) -> bool:
    """Returns True if a process of this machine, visible to this process, has this argument on its command line."""
    for path in glob.iglob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # ended meanwhile
            if os.fsencode(argument) in file.read().split(b"\0"):
                return True
    return False


def remove_all(listing: list[str], removal: list[str], quiet_s: float, starting: str = "") -> None:
    """Removes the listed containers, round after round, until for `quiet_s` seconds none has been listed and no process
    with the argument `starting` has run. Starts no round after `LONGEST_S` seconds. Failed commands are repeated.

    Args:
        listing: Command that prints the names of containers.
        removal: Command that removes the containers named in further arguments.
        quiet_s: Seconds without a container at the end.
        starting: Argument on the command line of client programs that start containers; "" for none.
    """
    start = quiet_since = time.monotonic()
    while (round_start := time.monotonic()) - start < LONGEST_S:
        # Clients first: if none runs now, the listing has the containers of all that have ended.
        client_runs = bool(starting) and runs_with(starting)
        names = output_of(listing)
        quiet = names is not None and not names and not client_runs
        if quiet and round_start - quiet_since >= quiet_s:
            return
        for first in range(0, len(names or ()), AT_ONCE):
            left_s = start + LONGEST_S - time.monotonic()  # containers with many files take minutes
            output_of([*removal, *(names or ())[first : first + AT_ONCE]], max(COMMAND_S, left_s))
        if not quiet:
            quiet_since = time.monotonic()
        time.sleep(ROUND_S)


def request_of(owner: int, listing: Sequence[str], removal: Sequence[str], starting: str = "") -> str:
    """Returns the argument of the reaper, as JSON.

    Args:
        owner: Process id of the owner.
        listing: Command that prints the names of the owner's containers.
        removal: Command that removes the containers named in further arguments.
        starting: Argument on the command line of client programs that start containers; "" for none. The reaper waits
            while such a program runs, and then `QUIET_S` seconds for further containers, at most `LONGEST_S` seconds.
    """
    return json.dumps({"owner": owner, "list": list(listing), "remove": list(removal), "starting": starting})


def main(request: str) -> None:
    """Starts a child process, prints the child's id on standard output, and ends this process: never returns to the
    caller. The child waits for the end of the owner, and then removes the owner's containers.

    Args:
        request: JSON text with the owner's process id, and the commands that list and remove containers (`request_of`).
    """
    with open("/proc/self/comm", "w") as name:
        name.write(CLEANER)
    child = os.fork()
    if child > 0:
        print(child, flush=True)
        os._exit(0)  # Ray's workers kill their children on exit: the reaper must not be a child
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # sent to all processes of a job that ends
        signal.signal(ignored, signal.SIG_IGN)
    parts = json.loads(request)
    wait_for(int(parts["owner"]))
    remove_all(parts["list"], parts["remove"], QUIET_S, parts["starting"])


if __name__ == "__main__":
    main(sys.argv[1])
