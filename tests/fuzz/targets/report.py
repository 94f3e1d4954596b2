"""A run's folder as read by the report: settings, rows of metrics, log, trajectories, timelines."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.cli.report import run, timeline, trajectories
from tests.fuzz.target import Target
from tests.fuzz.targets.settings import FILE
from tests.fuzz.values import packed, real, replaced, spoilt, unpacked, value

EVENTS = b"".join(
    b'{"time": 1.8e9, "after_step": 0, "text": "x", "kind": %b}\n' % kind
    for kind in (
        b'"started", "algorithm": "grpo", "gpus": 8, "model": {"parameters": 9}, "versions": {"torch": "2"}',
        b'"stage", "actors": "engine", "stage": "load", "count": 2',
        b'"stage_done", "actors": "engine", "stage": "load", "count": 2, "seconds": 1.5',
        b'"placed", "hosts": ["a"]',
        b'"settings_changed", "changes": ["a 1 \\u2192 2"]',
        b'"resumed", "step": 1',
        b'"step", "step": 1',
        b'"failures", "step": 1, "kinds": [{"status": "error_env", "count": 3, "example": "x"}]',
        b'"actor_given_up", "actor": "engine-1"',
        b'"health", "step": 1, "finding": "slow", "evidence": "x"',
        b'"fault"',
    )
)
SAMPLE: dict[str, Any] = {
    "uid": 1,
    "sample": 0,
    "status": "completed",
    "reward": 1.0,
    "turns": 1,
    "response_length": 2,
    "prompt_length": 2,
    "env_class": "gsm8k",
    "metadata": '{"a": 1}',
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    "versions": [{"version": 1, "start": 2}],
    "seconds": '{"total": 1.0}',
    "extras": "{}",
    "tools": "[]",
    "tokens": [1, 2, 3, 4],
    "mask": [0, 0, 1, 1],
    "logprobs": [0.0, 0.0, -1.0, -0.5],
}

STEP: dict[str, Any] = {
    **{"step": 1, "shown": 1.77e9, "start": 2000, "end": 9000, "slots": 8},
    "phases": [["generate", 2000, 5000], ["train", 5000, 8000], ["sync", 8000, 8500]],
    "engines": [[[0, 2000, 3000, 4000], [0, 3, 0], [0, 1, 0]], [[0, 9000], [0.5], [0.25]]],
    "environments": [[0, 9000], [1], [1]],
}
"""A step of a timeline."""


def _report(random: Random) -> Any:
    rows = [{"step": step, "reward/mean": step / 4, "time/step": 1.0, "loss/policy": 0.1} for step in range(4)]
    for _ in range(random.randrange(3)):
        row = random.choice(rows)
        row[random.choice([*row, "health/stuck", "x"])] = real(value(random))
    metrics = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {
        "config.yaml": FILE,
        "metrics.jsonl": metrics,
        "events.jsonl": EVENTS,
        "trajectories/step_000001.parquet": _samples(random),
        "timeline/step_000001.json.gz": gzip.compress(
            json.dumps(replaced(random, STEP) if random.random() < 0.5 else STEP).encode(), mtime=0
        ),
    }
    return {name: packed(spoilt(random, data) if random.random() < 0.25 else data) for name, data in files.items()}


def _samples(random: Random) -> bytes:
    samples = [SAMPLE, SAMPLE]
    if random.random() < 0.5:
        name = random.choice(list(SAMPLE))
        changed = (
            json.dumps(real(value(random))) if name in ("metadata", "seconds", "extras", "tools") else value(random)
        )
        samples = [{**SAMPLE, name: changed}] * 2
    elif random.random() < 0.5:
        samples = [replaced(random, SAMPLE)]
    buffer = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(samples), buffer, compression="none")
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pq.write_table(pa.Table.from_pylist([SAMPLE]), buffer, compression="none")
    return buffer.getvalue()


def _run(case: Any, folder: Path) -> None:
    for name, data in case.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(unpacked(data))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run([str(folder), "--html", str(folder / "run.html")])
        if (folder / "timeline").exists():  # older cases lack timelines
            timeline([str(folder)])
            timeline([str(folder), "--trace", str(folder / "trace.json.gz")])
        trajectories([str(folder)])
        trajectories([str(folder), "--html", str(folder / "all.html"), "--search", "y", "--sort", "-reward"])
    for text in (printed.getvalue(), (folder / "run.html").read_text(), (folder / "all.html").read_text()):
        text.encode()
        assert "\x1b" not in text and "\0" not in text


TARGETS = {"report": Target(_report, _run)}
