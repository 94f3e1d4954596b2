"""Requests to end soon: work in progress is abandoned or finished, and no finished work is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cluster import channel
from skyrl_mega.cluster.channel import Channel, StopRequest
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.telemetry.trackers.jsonl import JsonlTracker
from skyrl_mega.telemetry.trackers.trackers import Trackers
from skyrl_mega.trainer.checkpoints import Checkpoints
from skyrl_mega.trainer.loop import train
from skyrl_mega.trainer.run import Run, Step
from skyrl_mega.trainer.shutdown import GracefulStop, ShutdownRequest, Stopped, ending_signal
from tests.trainer.unmeasured import unmeasured


class FakeRun(Run):
    """A run of 6 steps of 10 prompts without training; `faults` holds the stop requests at moments of steps."""

    faults: dict[tuple[str, int], StopRequest]
    asked: StopRequest = StopRequest.NOTHING

    def next_groups(self, step: Step) -> list[Any]:
        self.stream.take(10)
        self.asked = self.faults.get(("sample", step.number), self.asked)
        return []

    def record_rollouts(self, step: Step) -> None:
        self.asked = self.faults.get(("learn", step.number), self.asked)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    config = Config()
    config.run.steps, config.data.prompts_per_step = 6, 10
    config.evaluation.every, config.evaluation.before, config.checkpoint.every = 0, False, 2
    fake: Any = SimpleNamespace(
        save=lambda folder: (folder / "weights").touch(), parallel=SimpleNamespace(ranks=1), next_groups=None
    )
    with Trackers(JsonlTracker(tmp_path)) as trackers:
        run = FakeRun(
            config=config,
            folder=tmp_path,
            console=Console(),
            trackers=trackers,
            policy=fake,
            reference=None,
            critic=None,
            sync=fake,
            rollouts=fake,
            evaluator=fake,
            stream=PromptStream(100, batch=10),
            checkpoints=Checkpoints(tmp_path / "checkpoints", keep=9),
            measurements=unmeasured(),
        )
        run.shutdown = ShutdownRequest(lambda: run.asked)
        run.faults = {}
        fake.next_groups = run.next_groups
        fake.prompts_left = lambda done: run.stream.remaining
        yield run


def state(run: Run) -> dict[str, Any]:
    newest = run.checkpoints.newest()
    assert newest is not None
    return run.checkpoints.state(newest)


def steps(run: Run) -> list[int]:
    return [row["step"] for row in read(run.folder / "metrics.jsonl")]


def test_a_step_that_only_generates_is_abandoned_and_the_ones_before_it_are_saved(run: FakeRun) -> None:
    run.faults["sample", 4] = StopRequest.SOON
    with pytest.raises(GracefulStop):
        train(run)
    assert steps(run) == [1, 2, 3]
    assert state(run)["step"] == 3
    assert state(run)["stream"]["position"] == 30  # the abandoned step's prompts are drawn again


def test_a_step_that_changes_the_policy_is_finished_and_saved(run: FakeRun) -> None:
    run.faults["learn", 3] = StopRequest.SOON
    with pytest.raises(GracefulStop):
        train(run)
    assert steps(run) == [1, 2, 3]
    assert (state(run)["step"], state(run)["stream"]["position"]) == (3, 30)


def test_a_checkpoint_that_is_there_is_not_written_again(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = run.checkpoints.save
    monkeypatch.setattr(run.checkpoints, "save", lambda step, *rest: (written.append(step), save(step, *rest))[1])
    run.faults["sample", 3] = StopRequest.SOON
    with pytest.raises(GracefulStop):
        train(run)
    assert written == [2]


def test_what_is_to_end_at_once_is_neither_finished_nor_saved(run: FakeRun) -> None:
    run.faults["learn", 3] = StopRequest.NOW
    with pytest.raises(Stopped) as caught:
        train(run)
    assert not isinstance(caught.value, GracefulStop)
    assert steps(run) == [1, 2, 3] and state(run)["step"] == 2


def test_no_handler_of_errors_takes_a_stop_for_one() -> None:
    assert not issubclass(Stopped, Exception)


def test_without_a_signal_all_steps_are_done(run: FakeRun) -> None:
    train(run)
    assert steps(run) == [1, 2, 3, 4, 5, 6] and state(run)["step"] == 6


def test_what_fails_after_a_signal_ended_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the signal behind errors: a scheduler's signal may reach actors first. After a request to end soon, a fault
    still counts as a fault."""
    new_channel = Channel()
    assert ending_signal(ValueError()) == "", "nobody asks"
    monkeypatch.setattr(channel, "_channel", new_channel)
    assert ending_signal(ValueError()) == ending_signal(Stopped()) == "", "nobody has asked"
    new_channel.ask(StopRequest.SOON, SIGUSR1)
    assert (ending_signal(GracefulStop()), ending_signal(ValueError())) == ("SIGUSR1", "")
    new_channel.ask(StopRequest.NOW, SIGTERM)
    assert ending_signal(Stopped()) == ending_signal(ValueError()) == "SIGTERM"
