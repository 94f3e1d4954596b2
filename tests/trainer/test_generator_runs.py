"""Whole runs with a generator: the agent loop as a generator is the built-in run, and a killed run resumes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.rollout.generators.finish import SAMPLED
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trajectories import parquet
from tests.support import generators
from tests.trainer import quickstart
from tests.trainer.test_asynchrony import ONE_RANK, UNEVALUATED, killed_and_resumed, rows

INDEPENDENT = f"rollout.generator={generators.__file__}:Independent"


def without(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != f"environment/of/{SAMPLED}"}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_agent_loop_as_a_generator_is_the_built_in_run(undisturbed: Path, tmp_path: Path) -> None:
    quickstart.finish(tmp_path, "run.name=own", *quickstart.THREE_STEPS, INDEPENDENT)
    assert [without(row) for row in rows(tmp_path / "own")] == rows(undisturbed)
    file = Path("trajectories") / "step_000001.parquet"
    own, built_in = (
        [(t.tokens, t.mask, t.logprobs, t.versions, t.reward, t.messages) for t in parquet.read(run / file)]
        for run in (tmp_path / "own", undisturbed)
    )
    assert own == built_in


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [0, 2])
def test_a_tree_search_all_the_time_ahead_resumes_and_loses_nothing(tmp_path: Path, processes: int) -> None:
    tree = ["rollout.generator=tree_search", "rollout.generator_options={depth: 1, tokens: 1}"]
    ahead = ["asynchrony.mode=full", "asynchrony.max_staleness=2", "telemetry.trajectories_every=1", *ONE_RANK]
    settings = [*ahead, *tree, *UNEVALUATED, "checkpoint.every=1", f"environment.processes={processes}"]
    output = killed_and_resumed(tmp_path, 2, *settings)
    assert "resuming after step" in output and "restored " in output
    folder = tmp_path / "killed"
    steps = {n: parquet.read(folder / "trajectories" / f"step_{n:06d}.parquet") for n in range(1, 5)}
    groups = Counter(t.prompt.uid for step in steps.values() for t in step)
    assert len(groups) == 64 and set(groups.values()) == {4}, "64 groups of 4 samples, each once"
    assert max(step - 1 - version for step, of in steps.items() for t in of for version, _ in t.versions) <= 2
    last: dict[str, Any] = {**read(folder / "metrics.jsonl")[-1]}
    assert 0 < last[f"environment/of/{SAMPLED}"] < last["rollout/tokens"] / len(steps[4]), "common beginnings"
    assert last["mismatch/logprob_abs_mean"] < 1
