"""Engine classes match the protocol `engines.base.Engine`, and the driver calls no other methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest

from skyrl_mega.engines.base import Engine, ForeignEngine
from skyrl_mega.engines.external.actor import ExternalEngine
from skyrl_mega.engines.vllm.actor import VllmEngine
from tests.architecture.source import modules
from tests.support.simulated_engine import SimulatedEngine


def methods(protocol: type) -> dict[str, Callable[..., object]]:
    """Returns name → function of a protocol's own methods."""
    return {name: f for name, f in vars(protocol).items() if inspect.isfunction(f) and not name.startswith("_")}


PROTOCOL = methods(Engine)
FOREIGN = methods(ForeignEngine)


@pytest.mark.parametrize("kind", [VllmEngine, SimulatedEngine, ExternalEngine])
def test_an_engine_has_every_method_with_its_parameters(kind: type) -> None:
    for name, function in PROTOCOL.items():
        assert parameters(getattr(kind, name)) == parameters(function)


def test_an_engine_outside_of_the_run_has_its_further_methods() -> None:
    for name, function in FOREIGN.items():
        assert parameters(getattr(ExternalEngine, name)) == parameters(function)


def parameters(function: Callable[..., object]) -> list[str]:
    """Returns the parameter names, without Ray's: Ray adds a parameter to actor classes used in this process."""
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def test_the_driver_calls_engines_by_these_names_alone() -> None:
    calls = re.compile(r'fleet(?:\.group)?\.(?:submit|ask)\(\s*(?:[^"()]+,\s*)?"(\w+)"')
    called = {name for text in modules().values() for name in calls.findall(text)}
    assert {"forget", "begin_update", "end_update"} <= called
    assert called <= {*PROTOCOL, *FOREIGN}
