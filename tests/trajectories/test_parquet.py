"""Trajectories on disk."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pyarrow.parquet as pq
import torch

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.sequences import Column
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, TrajectoryStep


def trajectory() -> Trajectory:
    question = [{"role": "user", "content": "2*3 = ü?"}]
    return Trajectory(
        Prompt(7, question, "multiply", {"reward_spec": {"ground_truth": "6"}, "extra_info": None}),
        sample=2,
        tokens=array("i", [5, 9, 11, 3]),
        mask=array("b", [0, 0, 1, 1]),
        logprobs=array("f", [0.0, 0.0, -0.25, -1.5]),
        prompt_length=2,
        reward=-0.5,
        status=Status.TRUNCATED_TURNS,
        turns=1,
        versions=[(12, 3), (13, 5)],
        messages=[*question, {"role": "assistant", "content": "6"}, {"role": "user", "content": "sure?"}],
        tools=[{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}],
        metadata={"parsed": 6, "why": ["a", "b"]},
        seconds={"generate": 0.5, "env": 0.25},
        steps=[
            TrajectoryStep(Kind.PROMPT, 0, 2, env_s=0.125, messages=1),
            TrajectoryStep(
                Kind.RESPONSE,
                2,
                4,
                at_s=0.25,
                generate_s=0.5,
                env_s=0.125,
                messages=1,
                reward=-0.5,
                finish="stop",
                tool_calls=[{"name": "search", "arguments": {"query": "ü", "topk": 3}}, "plain"],
            ),
            TrajectoryStep(Kind.OBSERVATION, 4, 4, at_s=0.875, messages=1),
        ],
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step.parquet"
    parquet.write(path, [trajectory(), trajectory()])
    assert parquet.read(path) == [trajectory(), trajectory()]
    assert [file.name for file in path.parent.iterdir()] == ["step.parquet"]


def test_columns_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    """Writes columns with shape, dtype and alignment, for those trajectories with columns, and reads older files
    without columns."""
    routed, path = trajectory(), tmp_path / "step.parquet"
    values = torch.arange(4 * 3 * 2).reshape(4, 3, 2)
    for name, dtype in (("routes", torch.uint8), ("wide", torch.int16)):
        routed.columns[name] = Column(values.to(dtype), "input")
    parquet.write(path, [routed, trajectory()])
    assert parquet.read(path) == [trajectory(), trajectory()]
    parquet.write(path, [routed, trajectory()], columns=True)
    routed_again, none = parquet.read(path)
    assert none == trajectory() and sorted(routed_again.columns) == ["routes", "wide"]
    for name, column in routed.columns.items():
        assert (
            routed_again.columns[name].aligned == "input"
            and routed_again.columns[name].values.dtype == column.values.dtype
        )
        assert torch.equal(routed_again.columns[name].values, column.values)
    pq.write_table(pq.read_table(path).drop_columns(["columns"]), path)
    assert parquet.read(path) == [trajectory(), trajectory()]


def test_a_person_reads_prompt_and_response(tmp_path: Path) -> None:
    parquet.write(tmp_path / "t.parquet", [trajectory()])
    row = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]
    assert row["prompt"] == "2*3 = ü?"
    assert row["response"] == "[assistant] 6\n[user] sure?"
    assert (row["status"], row["reward"], row["response_length"]) == ("truncated_turns", -0.5, 2)


def test_examples_in_the_prompt_are_no_response(tmp_path: Path) -> None:
    shot = [{"role": "user", "content": "1*1 = ?"}, {"role": "assistant", "content": "1"}]
    t = trajectory()
    t.messages, t.steps[0].messages = [*shot, *t.messages], 3
    parquet.write(tmp_path / "t.parquet", [t])
    row = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]
    assert row["prompt"] == "[user] 1*1 = ?\n[assistant] 1\n[user] 2*3 = ü?"
    assert row["response"] == "[assistant] 6\n[user] sure?"


def test_a_person_reads_what_happened_when(tmp_path: Path) -> None:
    parquet.write(tmp_path / "t.parquet", [trajectory()])
    prompt, response, observation = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]["steps"]
    assert (prompt["kind"], prompt["reward"], prompt["finish"], prompt["tool_calls"]) == ("prompt", None, None, [])
    assert (response["start"], response["end"], response["generate_s"], response["reward"]) == (2, 4, 0.5, -0.5)
    assert json.loads(response["tool_calls"][0])["arguments"] == {"query": "ü", "topk": 3}
    assert (observation["at_s"], observation["messages"]) == (0.875, 1)


def test_an_empty_step_is_a_file_too(tmp_path: Path) -> None:
    parquet.write(tmp_path / "t.parquet", [])
    assert parquet.read(tmp_path / "t.parquet") == []
