"""Restarts of a run after a fault, without a cluster: opening and finishing the run are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.trainer import checkpoints, setup, shutdown, train

Fault = Exception | None
RANK = ActorFailed("policy", 1, "train", "its process died")
NODE = NodeLost("policy-0 failed; lost nodes of the Ray cluster: no longer answering: 10.0.0.2")
MISSING = NodesMissing("1 of 2 nodes of the Ray cluster have joined")
Trains = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trains:
    """Trains with a fault per start, before or after a step; returns the number of starts and the output."""

    def trains(*starts: tuple[str, Fault], restarts: int = 2) -> tuple[int, list[str]]:
        begun: list[tuple[str, Fault]] = []
        lines: list[str] = []

        @contextmanager
        def opened(*_: Any) -> Iterator[Any]:
            begun.append(starts[len(begun)])
            when, fault = begun[-1]
            if when == "opening" and fault is not None:
                raise fault
            yield SimpleNamespace(step=7)

        def finish(run: Any) -> None:
            when, fault = begun[-1]
            run.step += when == "later"
            if fault is not None:
                raise fault

        monkeypatch.setattr(setup, "open_run", opened)
        monkeypatch.setattr(train, "finish", finish)
        config = Config()
        config = replace(config, run=replace(config.run, restarts=restarts))
        console: Any = SimpleNamespace(say=lines.append)
        train.train(config, tmp_path, console)
        return len(begun), lines

    return trains


@pytest.mark.parametrize("fault", [RANK, NODE, ClusterError("Ray is gone")])
def test_after_a_step_any_fault_is_one_to_start_again_from(trains: Trains, fault: Exception) -> None:
    times, lines = trains(("later", fault), ("later", None))
    assert times == 2
    assert lines == [f"fault: {fault}", "restarting the run from its newest checkpoint (1 restarts left)"]


def test_what_worked_once_may_fail_in_its_next_starts(trains: Trains) -> None:
    assert trains(("later", RANK), ("opening", RANK), ("later", None))[0] == 3
    assert trains(("later", RANK), ("at once", RANK), ("opening", RANK), ("later", None), restarts=3)[0] == 4


@pytest.mark.parametrize("when", ["opening", "at once"])
def test_what_never_worked_is_not_tried_again(trains: Trains, when: str) -> None:
    for fault in (RANK, ClusterError("Ray is gone"), MISSING):
        with pytest.raises(type(fault)):
            trains((when, fault))


@pytest.mark.parametrize("when", ["opening", "at once"])
def test_a_node_that_dies_in_the_start_is_no_reason_to_give_up(trains: Trains, when: str) -> None:
    assert trains((when, NODE), ("later", None))[0] == 2


def test_nodes_that_did_not_come_have_been_waited_for(trains: Trains) -> None:
    with pytest.raises(NodesMissing):
        trains(("later", NODE), ("opening", MISSING), restarts=9)


def test_restarts_are_counted(trains: Trains) -> None:
    assert trains(("later", RANK), ("later", NODE), ("later", None))[0] == 3
    with pytest.raises(ActorFailed, match="policy-1"):
        trains(("later", NODE), ("later", NODE), ("later", RANK))
    with pytest.raises(ActorFailed):
        trains(("later", RANK), restarts=0)
    with pytest.raises(NodeLost):
        trains(("opening", NODE), ("opening", NODE), ("opening", NODE))


def test_a_signal_that_everything_had_is_the_cause(trains: Trains, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_: Any) -> None:
        raise shutdown.Stopped("SIGTERM")

    monkeypatch.setattr(shutdown.ShutdownRequest, "raise_if_requested", look)
    for when in ("later", "opening"):
        with pytest.raises(shutdown.Stopped):
            trains((when, RANK))


def test_a_folder_of_another_format_is_refused_before_anything_starts(
    trains: Trains, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        assert folder.name == "checkpoints"
        raise UserError("an old checkpoint")

    monkeypatch.setattr(checkpoints, "refuse_unusable", refuse)
    with pytest.raises(UserError):
        trains()
