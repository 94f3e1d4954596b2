"""Faults keep their facts on the way from an actor to the terminal."""

from __future__ import annotations

import pickle

from skyrl_mega.cluster.errors import ActorFailed, ActorTimeout, NodeLost, fault_event
from skyrl_mega.cluster.fleet import NoServingActor


def test_a_fault_keeps_kind_text_and_fields_when_it_is_pickled() -> None:
    for fault in (
        ActorFailed("engine", 2, "generate_many", "out of memory", others=3, log="/logs/engine-2.log"),
        NoServingActor("engine", None, "service", "all have failed"),
        ActorTimeout([("policy", 0), ("policy", 5)], "train", 60),
        NodeLost("a node is gone"),
    ):
        again = pickle.loads(pickle.dumps(fault))
        assert type(again) is type(fault) and str(again) == str(fault) and again.__dict__ == fault.__dict__


def test_an_event_has_the_fields_of_a_fault() -> None:
    event = fault_event(ActorFailed("engine", 2, "generate_many", "out of memory", others=1, log="/logs/x"))
    assert str(event) == (
        "fault: engine-2 (rank 2) failed in generate_many: out of memory; its log: /logs/x (1 more failed after it)"
    )
    assert event.kind == "fault" and event.facts == {
        **{"error": "ActorFailed", "actor": "engine-2", "rank": 2, "method": "generate_many"},
        **{"cause": "out of memory", "log": "/logs/x"},
    }
    assert fault_event(OSError("disk is full")).facts == {"error": "OSError"}
    assert str(NoServingActor("engine", None, "service", "asleep")) == "engine failed in service: asleep"
