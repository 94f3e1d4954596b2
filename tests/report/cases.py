"""Runs and trajectories for the tests of this package, written by hand."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.concurrency_series import ConcurrencySeries
from skyrl_mega.telemetry.step_timeline import FOLDER, StepTimeline, file_name
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status, Trajectory

BEGAN = 1_770_000_000.0
"""Seconds since 1970 of a run's first event."""
EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> \u202eevil \x1b[2J <!-- &lt;"
"""A hostile text of a policy."""


def single(uid: int = 7, sample: int = 0, reward: float = 1.0, text: str = "6", **other: Any) -> Trajectory:
    """Returns a trajectory of a question and an answer: four tokens, the last two by the policy."""
    question = [{"role": "user", "content": "2*3 = ü?"}]
    t = Trajectory(
        Prompt(uid, question, "multiply", {"reward_spec": {"ground_truth": "6"}}),
        sample=sample,
        tokens=array("i", [5, 9, 11, 3]),
        mask=array("b", [0, 0, 1, 1]),
        logprobs=array("f", [0.0, 0.0, -0.25, -1.5]),
        prompt_length=2,
        reward=reward,
        status=Status.COMPLETED,
        turns=1,
        versions=[(12, 2)],
        messages=[*question, {"role": "assistant", "content": text}],
        metadata={"parsed": 6},
        seconds={"generate": 0.5, "env": 0.0025},
    )
    return replace(t, **other)


def double() -> Trajectory:
    """Returns a trajectory of a worked example, a question, and two turns around an observation, the second under newer
    weights.
    """
    prompt = [
        {"role": "user", "content": "example question"},
        {"role": "assistant", "content": "example answer"},
        {"role": "user", "content": "the question"},
    ]
    return Trajectory(
        Prompt(8, prompt, "search", {}),
        sample=1,
        tokens=array("i", range(20, 32)),
        mask=array("b", [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1]),
        logprobs=array("f", [0.0] * 4 + [-0.1, -2.0, -0.2] + [0.0] * 2 + [-0.05, -0.5, -5.0]),
        prompt_length=4,
        reward=0.5,
        status=Status.TRUNCATED_TURNS,
        turns=2,
        versions=[(3, 4), (4, 9)],
        messages=[
            *prompt,
            {"role": "assistant", "content": "<search>first</search>"},
            {"role": "tool", "content": "found nothing"},
            {"role": "assistant", "content": "second"},
        ],
        metadata={"why": ["a", "b"], "score": float("nan")},
        seconds={"generate": 75.0, "env": 1.25},
    )


def steps_of_double() -> list[dict[str, Any]]:
    """Returns the steps of `double` in the form of the store."""
    none = dict(at_s=0.0, generate_s=0.0, env_s=0.0, reward=None, finish=None, tool_calls=[])
    call = json.dumps({"name": "search", "arguments": {"query": "ü"}})
    return [
        {**none, "kind": "prompt", "start": 0, "end": 4, "messages": 3},
        {
            **none,
            **dict(kind="response", start=4, end=7, messages=1, at_s=0.5, generate_s=40.0, env_s=1.0),
            **dict(reward=0.25, finish="stop", tool_calls=[call, json.dumps("plain words")]),
        },
        {**none, "kind": "observation", "start": 7, "end": 9, "messages": 1, "at_s": 41.5},
        {
            **none,
            **dict(kind="response", start=9, end=12, messages=1, at_s=42.0, generate_s=35.0, env_s=0.25),
            **dict(reward=0.25, finish="length"),
        },
    ]


def with_steps(file: Path, steps: Sequence[list[dict[str, Any]]]) -> None:
    """Adds the column `steps` to a trajectory file, a list per row."""
    table = pq.read_table(file)
    if "steps" in table.column_names:
        table = table.drop_columns(["steps"])
    pq.write_table(table.append_column("steps", pa.array(steps, parquet.STEPS)), file)


def run_folder(folder: Path, files: dict[int, list[Trajectory]] | None = None, model: str = "") -> Path:
    """Writes a run's folder with settings and trajectories."""
    folder.mkdir(parents=True)
    settings = {"run": {"name": folder.name, "steps": 4}, "model": {"path": model}, "rollout": {"options": {"seed": 1}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    for step, trajectories in (files or {}).items():
        parquet.write(folder / "trajectories" / f"step_{step:06d}.parquet", trajectories)
    return folder


def metrics(folder: Path, rows: Sequence[dict[str, float | None]]) -> None:
    """Writes a run's metrics."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def events(folder: Path, *rows: dict[str, Any]) -> None:
    """Writes a run's events, a second apart."""
    common = {"after_step": 0, "text": ""}
    lines = [json.dumps({"time": BEGAN + second, **common, **row}) for second, row in enumerate(rows)]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


def when(second: int) -> str:
    """Returns the local time of an event written by `events`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + second))


def timelines(folder: Path, steps: int, engines: int = 2, first: float = 1_770_000_000.0) -> None:
    """Writes timelines of consecutive steps of 10 s: engines with decreasing requests for 5 s, training from 5.5 to 8
    s, a sync of 1 s, and a checkpoint of 2 s before the second step.
    """
    (folder / FOLDER).mkdir()
    at = first
    for number in range(1, steps + 1):
        shown, start = at, at + 2 * (number == 2)
        end = at = start + 10
        times = [shown, start + 0.001, *(start + second for second in range(1, 6)), end]
        counts = [0.0, *(float(5 - second) for second in range(5)), 0.0]
        busy = [float(count > 0) for count in counts]
        phases = [("generate", 0.0, 5.0), ("train", 5.5, 8.0), ("sync", 8.0, 9.0)]
        spans = [Span(name, start + a, start + b) for name, a, b in phases]
        if number == 2:
            spans.insert(0, Span("checkpoint", shown, start))
        each = [
            ConcurrencySeries.from_intervals(times, [(e + 1) * count for count in counts], busy) for e in range(engines)
        ]
        timeline = StepTimeline(
            number, shown, start, end, spans, each, ConcurrencySeries.from_intervals(times, counts, busy), 8
        )
        (folder / FOLDER / file_name(number)).write_bytes(timeline.dumps())
