"""Residency moves the parts needed by a phase: offload before onload, nothing twice, and nothing by default."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.config.residency import ENGINE, NEEDS, PARTS, POLICY, kept
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer import residency
from skyrl_mega.trainer.residency import Residency
from skyrl_mega.trainer.step import Step


class Devices:
    """Models and engines; every move is recorded, and refused beyond the available memory."""

    def __init__(self, most: Callable[[set[str]], bool] = lambda resident: True) -> None:
        self.there, self.most = set(PARTS), most
        self.moves: list[tuple[str, tuple[str, ...]]] = []

    def _leave(self, parts: Any) -> list[int]:
        self.moves.append(("out", tuple(parts)))
        self.there -= set(parts)
        return [10 * len(parts), 7]

    def _come(self, parts: Any) -> list[int]:
        self.moves.append(("in", tuple(parts)))
        self.there |= set(parts)
        assert self.most(self.there), f"no room for {parts} beside {self.there}"
        return [10 * len(parts), 7]

    offload = sleep = _leave
    onload = wake = _come


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "gather", lambda calls, timeout: calls)


def ledger(devices: Any, keep: list[str] | None, critic: bool = True) -> Residency:
    return Residency(keep, policy=devices, critic=devices if critic else None, fleet=devices, timeout_s=1.0)


STEP = ["generate", "logprobs", "values", "critic", "train", "sync", "eval", "checkpoint", "generate"]


@given(st.sets(st.sampled_from(PARTS)), st.lists(st.sampled_from([*NEEDS, "checkpoint"]), max_size=12))
def test_a_phase_finds_what_it_needs_and_no_more_than_that_and_what_is_kept(keep: set[str], phases: list[str]) -> None:
    """Enters random phases; the device never holds more than the larger of two phases, as offload comes before
    onload."""
    devices = Devices()
    run = ledger(devices, sorted(keep))
    last: frozenset[str] | None = None
    for phase in phases:
        wanted = NEEDS[phase] | keep if phase in NEEDS else last
        if last is not None and wanted is not None:
            devices.most = wanted.issuperset
        before = len(devices.moves)
        metrics = run.enter(phase)
        if wanted is None:
            assert devices.there == set(PARTS)
            continue
        assert devices.there == wanted
        if wanted == last:
            assert not metrics and len(devices.moves) == before, "nothing moves twice"
        last = wanted


def test_without_the_setting_nothing_is_called() -> None:
    class Nobody:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} is called")

    run, step = ledger(Nobody(), None), Step(1, Console(), prepare=Residency().enter)
    for phase in STEP:
        assert run.enter(phase) == {}
        with step.phase(phase):
            pass
    assert set(step.metrics) == {f"time/{phase}" for phase in STEP}


def test_a_step_counts_what_moved() -> None:
    devices = Devices()
    run = ledger(devices, [], critic=False)
    step = Step(1, Console(), prepare=run.enter)
    for phase in ("generate", "logprobs", "train", "sync", "generate", "checkpoint"):
        with step.phase(phase):
            pass
    assert step.metrics["time/residency"] >= 0 and step.metrics["time/checkpoint"] >= 0
    assert step.metrics["residency/bytes_out"] == 30 + 7 + 7 + 20 + 10, "each move's largest rank"
    assert step.metrics["residency/bytes_in"] == 0 + 10 + 20 + 0 + 0
    moved = [(where, parts) for where, parts in devices.moves if parts]
    assert moved == [
        ("out", POLICY),  # the state at the start is unknown
        ("in", ENGINE),
        ("out", ENGINE),
        ("in", ("parameters",)),
        ("in", ("gradients", "optimizer")),
        ("out", ("gradients", "optimizer")),
        ("in", ("engine_weights",)),
        ("out", ("parameters",)),
        ("in", ("kv_cache",)),
    ]


def test_a_move_that_failed_is_made_again() -> None:
    devices = Devices()
    run = ledger(devices, [])
    run.enter("generate")
    devices.most = lambda resident: "parameters" not in resident
    with pytest.raises(AssertionError, match="no room"):
        run.enter("train")
    devices.most = lambda resident: True
    run.enter("train")
    assert devices.there == NEEDS["train"]


def test_an_engine_that_starts_again_gets_its_memory() -> None:
    """Restarts engines in a phase during which the loop waits for engines: the models' parts are offloaded for one
    engine at a time."""
    devices = Devices()
    run = ledger(devices, ["critic"])
    run.enter("sync")
    inside: list[set[str]] = []

    def start(engine: int) -> None:
        with run.free_for_engine(engine):
            inside.append(set(devices.there))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(start, range(2)))
    assert inside == [{"critic", "engine_weights"}] * 2
    assert devices.there == NEEDS["sync"] | kept(["critic"]), "and comes back"
    run.enter("generate")
    devices.moves.clear()
    start(0)
    assert [parts for _, parts in devices.moves] == [(), ()], "only what torch keeps for later is given back"


def test_where_engines_keep_all_their_memory_a_model_is_left_alone() -> None:
    devices = Devices()
    run = ledger(devices, [*ENGINE])
    run.enter("train")
    with run.free_for_engine(0):
        assert devices.there >= set(POLICY)


def test_what_made_room_comes_back_where_the_start_fails() -> None:
    devices = Devices()
    run = ledger(devices, [])
    run.enter("sync")

    def start(fails: bool) -> None:
        with run.free_for_engine(0):
            if fails:
                raise RuntimeError("the engine does not start")

    with pytest.raises(RuntimeError, match="does not start"):
        start(True)
    assert devices.there == NEEDS["sync"]
    start(False)
    assert devices.there == NEEDS["sync"]


@pytest.mark.parametrize("phase", ["logprobs", "sync"])
def test_an_engine_that_starts_while_others_fall_asleep_is_still_in_the_phase_before(phase: str) -> None:
    """Restarts an engine while the others are put to sleep: the loop waits, and no part of the next phase may be
    onloaded next to an awake engine."""
    run: list[Residency] = []

    class Slow(Devices):
        starting = False

        def sleep(self, parts: Any) -> list[int]:
            if self.starting:
                with run[0].free_for_engine(0):
                    assert "parameters" not in self.there
                assert "parameters" not in self.there, "it would lie beside an engine that is awake"
            return self._leave(parts)

    devices = Slow()
    run.append(ledger(devices, []))
    run[0].enter("generate")
    devices.starting = True
    run[0].enter(phase)
    assert devices.there == NEEDS[phase]
