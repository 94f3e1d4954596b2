"""Real services over small indexes, in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.envs.search import facts
from skyrl_mega.retriever.client import TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]


def write_corpus(file: Path) -> Path:
    """Writes the project's own facts as JSON lines."""
    records = ({"id": str(i), "title": t, "text": s} for i, (t, s) in enumerate(facts.passages().items()))
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return file


@dataclass
class Running:
    """A running service."""

    url: str
    process: subprocess.Popen[str]
    ready_file: Path


@contextmanager
def running(index: Path, folder: Path, *options: str, token: str = "", port: int = 0) -> Iterator[Running]:
    """Runs `serve` with these options, yields after the ready file appears, and ends the service afterwards."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "skyrl_mega.retriever", "serve", "--index", str(index), "--port", str(port)]
    command += ["--ready-file", str(ready), "--threads", "1", *options]
    env = {**os.environ, TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        end = time.monotonic() + 240
        while not ready.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "not ready in 240 s"
            time.sleep(0.05)
        yield Running(json.loads(ready.read_text())["url"], process, ready)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=120)
