"""The workload: random trajectories, or trajectories recorded from a run."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random
from statistics import mean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.simulation.simulate import UNITS_PER_ANSWER, UnitCounter, grain_of
from skyrl_mega.simulation.workload import Length, LogNormal, Recorded, Synthetic, Turn
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import GREEDY, Kind, Status, Trajectory, TrajectoryStep

STEPS = [
    TrajectoryStep(Kind.PROMPT, 0, 3, env_s=9.0),
    TrajectoryStep(Kind.RESPONSE, 3, 5, env_s=1.5),
    TrajectoryStep(Kind.OBSERVATION, 5, 8),
    TrajectoryStep(Kind.RESPONSE, 8, 10, env_s=0.5),
    TrajectoryStep(Kind.OBSERVATION, 10, 10),
]


def trajectory(uid: int = 0, sample: int = 0, steps: list[TrajectoryStep] = STEPS) -> Trajectory:
    tokens = array("i", [0] * 10)
    return Trajectory(
        Prompt(uid, [], "mine", {}), sample, tokens, array("b", [0] * 10), array("f", [0.0] * 10), 3, 0.0,
        Status.COMPLETED, 2, steps=steps,
    )  # fmt: skip


def recorded(folder: Path) -> Path:
    parquet.write(folder / "trajectories" / "step_000001.parquet", [trajectory(), trajectory(sample=1)])
    return folder


def test_turns_are_read_from_a_run(tmp_path: Path) -> None:
    recording = Recorded.of_run(recorded(tmp_path))
    assert recording.groups == [[[Turn(3, 2, 1.5), Turn(3, 2, 0.5)]] * 2]
    assert recording.length == Length(6, 4, 2)


def test_steps_are_those_that_were_written(tmp_path: Path) -> None:
    path = recorded(tmp_path) / "trajectories" / "step_000001.parquet"
    assert parquet.read_steps(path) == [[t.steps for t in parquet.read(path)]]


def test_groups_stay_together_and_all_come_before_one_comes_again(tmp_path: Path) -> None:
    """Reads groups with a repeated prompt and with greedy answers."""

    def of(seconds: float, uid: int, sample: int) -> Trajectory:
        return trajectory(uid, sample, [TrajectoryStep(Kind.RESPONSE, 3, 5, env_s=seconds)])

    played = [of(10 * group + sample, max(1, group), sample) for group in range(3) for sample in range(2)]
    parquet.write(tmp_path / "trajectories" / "step_000001.parquet", [*played, of(99, 1, GREEDY)])
    parquet.write(tmp_path / "trajectories" / "step_000002.parquet", [of(30 + s, 2, s) for s in range(2)])
    recording = Recorded.of_run(tmp_path)
    seconds_by_group = sorted([turns[0].env_s for turns in group] for group in recording.groups)
    assert seconds_by_group == [[0, 1], [10, 11], [20, 21], [30, 31]]
    drawn = [[recording.sample_turns(Random(0), group, sample)[0].env_s for sample in range(2)] for group in range(8)]
    assert sorted(drawn[:4]) == seconds_by_group and [[b, a] for a, b in drawn[4:]] == drawn[:4], (
        "others come first then"
    )


FOREIGN = {
    "text": b"not parquet",
    "empty": b"",
    "no column": pa.table({"loss": [1.0]}),
    "no prompts": pa.table({"steps": pa.array([[STEPS[1].__dict__]], parquet.STEPS)}),
    "another type": pa.table({"uid": [0, 0], "sample": [0, 1], "steps": [1, 2]}),
    "nothing of it": pa.table({"uid": [0], "sample": [0], "steps": pa.array([[None]], parquet.STEPS)}),
    "backwards": pa.table(
        {
            "uid": [0],
            "sample": [0],
            "steps": pa.array([[{**vars(STEPS[1]), "kind": "response", "start": 9}]], parquet.STEPS),
        }
    ),
    "no seconds": pa.table(
        {
            "uid": [0],
            "steps": pa.array([[{**vars(STEPS[1]), "kind": "response", "env_s": float("nan")}]], parquet.STEPS),
        }
    ),
    "another kind": pa.table(
        {"uid": [0], "sample": [0], "steps": pa.array([[{**vars(STEPS[1]), "kind": "song"}]], parquet.STEPS)}
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_broken_or_foreign_file_is_told(name: str, tmp_path: Path) -> None:
    content = FOREIGN[name]
    file = recorded(tmp_path) / "trajectories" / "step_000002.parquet"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pq.write_table(content, file)
    with pytest.raises(UserError) as raised:
        Recorded.of_run(tmp_path)
    assert "step_000002.parquet" in str(raised.value) and "\n" not in str(raised.value)


def test_the_mean_is_that_of_what_is_drawn() -> None:
    workload = Synthetic(100, LogNormal(1000, 1.0), LogNormal(3, 1.0), 3, max_tokens=2000, max_env_s=10)
    random = Random(0)
    drawn = [workload.sample_turns(random, 0, 0) for _ in range(6000)]
    assert workload.length == Length(
        100, pytest.approx(mean(sum(t.written for t in turns) for turns in drawn), rel=0.02), 3
    )
    assert max(turn.env_s for turns in drawn for turn in turns) == 10
    assert LogNormal(1000, 0).capped_mean(300) == 300 and LogNormal(0, 1).capped_mean(300) == 0


def test_an_environment_takes_time_before_the_first_turn_and_after_the_last() -> None:
    start, end = LogNormal(5, 0), LogNormal(60, 0)
    workload = Synthetic(100, LogNormal(40, 0), LogNormal(2, 0), 4, 10**6, max_env_s=50, start=start, end=end)
    turns = workload.sample_turns(Random(0), 0, 0)
    assert [turn[:2] for turn in turns] == [(0, 0), (100, 10), (0, 10), (0, 10), (0, 10)]
    seconds = [turn.env_s for turn in turns]
    assert seconds == pytest.approx([5, 2, 2, 2, 2 + 50]), "the end is cut at 50 s, in addition to the turn's 2 s"
    assert workload.environment_s == pytest.approx(sum(seconds)) == pytest.approx(63)
    assert workload.length == Length(100, 40, 4)


@pytest.mark.parametrize("unit", [1, 7, 64])
def test_counting_in_units_favours_no_length(unit: int) -> None:
    """Counts parts in units, including parts smaller than a unit: the sum and each part are unbiased."""
    parts, drawn = (5, 100, 3, 40), []
    for seed in range(4000):
        whole = UnitCounter(unit, Random(seed))
        drawn.append([whole.units(part) for part in parts])
        assert abs(sum(drawn[-1]) - sum(parts) / unit) < 1
    for part, units in zip(parts, zip(*drawn, strict=True), strict=True):
        assert mean(units) == pytest.approx(part / unit, abs=0.03)


def test_long_answers_are_counted_by_more_tokens() -> None:
    for mean_of_all, turns in ((200, 1), (UNITS_PER_ANSWER * 10, 1), (UNITS_PER_ANSWER * 30, 3)):
        workload = Synthetic(0, LogNormal(mean_of_all, 0), LogNormal(0, 0), turns, 10**9)
        assert grain_of(workload) == max(1, mean_of_all // turns // UNITS_PER_ANSWER)


@pytest.mark.parametrize(
    "text", ["", "five", "0.9", "-1", "inf", "nan", "1e9", "5,nan", "5,inf", "5,3.1", "5,-1", "5,", "1,2,3", "x" * 999]
)
def test_what_is_no_distribution_is_told(text: str) -> None:
    with pytest.raises(UserError, match=r"^--tokens .+: allowed is MEAN,SIGMA with a MEAN of 1 to 60 and a SIGMA of 0"):
        LogNormal.parsed(text, "--tokens", 1, 60)
    assert LogNormal.parsed("60,3", "--tokens", 1, 60) == LogNormal(60, 3)
    assert LogNormal.parsed("1", "--tokens", 1, 60) == LogNormal(1, 0)
