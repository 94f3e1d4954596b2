"""Asked to end soon: what is under way is abandoned or finished, and nothing that was done is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.metrics import MetricsWriter, read
from skyrl_mega.trainer.checkpoints import Checkpoints
from skyrl_mega.trainer.loop import train
from skyrl_mega.trainer.run import Run, Step
from skyrl_mega.trainer.stop import Leaving, Notice, Stopped


def signal_me() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


class FakeRun(Run):
    """A run of 6 steps of 10 prompts that learns nothing; `faults` are called at moments of its steps."""

    faults: dict[tuple[str, int], Callable[[], None]]

    def sample(self, step: Step) -> list[Any]:
        self.stream.take(10)
        self.faults.get(("sample", step.number), lambda: None)()
        return []

    def keep(self, step: Step) -> None:
        self.faults.get(("learn", step.number), lambda: None)()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    config = Config()
    config.run.steps, config.data.prompts_per_step = 6, 10
    config.evaluation.every, config.evaluation.before, config.checkpoint.every = 0, False, 2
    notice = Notice()
    fake: Any = SimpleNamespace(
        save=lambda folder: (folder / "weights").touch(), parallel=SimpleNamespace(ranks=1), sample=None
    )
    with MetricsWriter(tmp_path, tensorboard=False) as metrics, notice.listening():
        run = FakeRun(
            config=config,
            folder=tmp_path,
            console=Console(),
            metrics=metrics,
            policy=fake,
            reference=None,
            sync=fake,
            sampler=fake,
            evaluator=fake,
            stream=PromptStream(100, batch=10),
            checkpoints=Checkpoints(tmp_path / "checkpoints", keep=9),
            response_limit=1,
            notice=notice,
        )
        run.faults = {}
        fake.sample = run.sample
        yield run


def state(run: Run) -> dict[str, Any]:
    newest = run.checkpoints.newest()
    assert newest is not None
    return run.checkpoints.state(newest)


def steps(run: Run) -> list[int]:
    return [row["step"] for row in read(run.folder / "metrics.jsonl")]


def test_a_step_that_only_generates_is_abandoned_and_the_ones_before_it_are_saved(run: FakeRun) -> None:
    run.faults["sample", 4] = signal_me
    with pytest.raises(Leaving, match="SIGUSR1"):
        train(run)
    assert steps(run) == [1, 2, 3]
    assert state(run)["step"] == 3
    assert state(run)["stream"]["position"] == 30  # the abandoned step's prompts are drawn again


def test_a_step_that_changes_the_policy_is_finished_and_saved(run: FakeRun) -> None:
    run.faults["learn", 3] = signal_me
    with pytest.raises(Leaving):
        train(run)
    assert steps(run) == [1, 2, 3]
    assert (state(run)["step"], state(run)["stream"]["position"]) == (3, 30)


def test_a_checkpoint_that_is_there_is_not_written_again(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    save = run.checkpoints.save
    monkeypatch.setattr(run.checkpoints, "save", lambda step, *rest: (written.append(step), save(step, *rest))[1])
    run.faults["sample", 3] = signal_me
    with pytest.raises(Leaving):
        train(run)
    assert written == [2]


def test_the_second_signal_ends_at_once(run: FakeRun) -> None:
    def twice() -> None:
        signal_me()
        signal_me()

    run.faults["learn", 3] = twice
    with pytest.raises(Stopped) as caught:
        train(run)
    assert not isinstance(caught.value, Leaving)
    assert steps(run) == [1, 2] and state(run)["step"] == 2


def test_one_that_got_lost_is_obeyed_before_the_policy_is_touched(run: FakeRun) -> None:
    """An event loop may swallow what a signal handler raises in one of its callbacks."""

    def swallowed() -> None:
        with pytest.raises(Leaving):
            signal_me()

    run.faults["sample", 3] = swallowed
    with pytest.raises(Leaving):
        train(run)
    assert steps(run) == [1, 2] and state(run)["step"] == 2


def test_without_a_signal_all_steps_are_done(run: FakeRun) -> None:
    train(run)
    assert steps(run) == [1, 2, 3, 4, 5, 6] and state(run)["step"] == 6
