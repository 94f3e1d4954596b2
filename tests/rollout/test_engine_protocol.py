"""An engine is what `engines.base.Engine` says, and the driver asks for nothing else."""

from __future__ import annotations

import inspect
import re

import pytest

from skyrl_mega.engines.base import Engine
from skyrl_mega.engines.vllm.actor import VllmEngine
from tests.laws.source import modules
from tests.support.simulated_engine import SimulatedEngine

PROTOCOL = {name: f for name, f in vars(Engine).items() if inspect.isfunction(f) and not name.startswith("_")}


@pytest.mark.parametrize("kind", [VllmEngine, SimulatedEngine])
def test_an_engine_has_every_method_with_its_parameters(kind: type) -> None:
    for name, function in PROTOCOL.items():
        assert inspect.signature(getattr(kind, name)).parameters.keys() == inspect.signature(function).parameters.keys()


def test_the_driver_calls_engines_by_these_names_alone() -> None:
    calls = re.compile(r'fleet(?:\.group)?\.(?:submit|ask)\(\s*(?:[^"()]+,\s*)?"(\w+)"')
    called = {name for text in modules().values() for name in calls.findall(text)}
    assert {"forget", "begin_update", "end_update"} <= called
    assert called <= set(PROTOCOL)
