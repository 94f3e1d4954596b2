"""Rehearses proofs in forks of a process after the imports of torch and megatron-core: `… FOLDER PROOF …`.

Imports take four fifths of a rehearsal's time. `python -m benchmarks.gpu --rehearse` starts real processes instead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.gpu import child, processes, runner
from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.results import Results


class Fork:
    """The process of a proof, with the interface of `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, arguments: list[str], env: dict[str, str], output: BinaryIO) -> None:
        self.pid = os.fork()
        if self.pid:
            with contextlib.suppress(PermissionError):  # the child called setpgid first
                os.setpgid(self.pid, self.pid)
            return
        os.setpgid(0, 0)
        os.environ.update(env)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        code = child.main(*arguments)
        sys.stdout.flush()
        os._exit(code)

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Waits for the end of the process and returns its exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def main(folder: str, *names: str) -> None:
    """Rehearses the named proofs, and writes the results into a folder."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork lacks the parent's threads
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiler asks for properties that the CPU's stand-in for CUDA lacks
    import megatron.core  # noqa: F401

    import skyrl_mega.megatron.worker  # noqa: F401

    forks: Any = Fork
    runner.start = forks
    context: Any = multiprocessing.get_context("fork")
    processes._context = context
    proofs = [proof for proof in PROOFS if proof.name in names]
    runner.run(proofs, Results(Path(folder), {"name": "a rehearsal on the CPU"}, {}), runner.Call(800.0, tiny=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
