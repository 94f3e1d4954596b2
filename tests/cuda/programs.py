"""Ranks of a rehearsal with Transformer Engine, each a process of its own: what it changes is for good."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.config.precision import environment
from skyrl_mega.config.schema import PolicyConfig

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300


def run(module: str, folder: Path, cases: Sequence[Any], policies: Iterable[PolicyConfig]) -> list[Any]:
    """What each rank answers: `python -m tests.cuda.<module>` with its case. Logs are in the folder."""
    variables = {name: value for policy in policies for name, value in environment(policy.precision).items()}
    variables |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    # No kernel is compiled on a CPU. What makes scales of magnitudes is Transformer Engine's Python, not its kernel.
    variables |= {"TORCHDYNAMO_DISABLE": "1", "NVTE_UNFUSED_FP8_UPDATE": "1"}
    started = []
    for rank, case in enumerate(cases):
        given, log, out = (folder / f"{rank}.{end}" for end in ("case", "log", "out"))
        given.write_bytes(pickle.dumps(case))
        command = [sys.executable, "-W", "ignore", "-m", f"tests.cuda.{module}", str(out)]
        with given.open("rb") as file, log.open("wb") as said:
            environ = os.environ | variables
            process = subprocess.Popen(command, stdin=file, stderr=said, stdout=said, cwd=ROOT, env=environ)
        started.append((process, log, out))
    for process, log, _ in started:
        assert process.wait(timeout=LIMIT_S) == 0, log.read_text()[-3000:]
    return [pickle.loads(out.read_bytes()) for _, _, out in started]
