"""Parameters for tests with a fixture that computes all cases at once: every change tests some, a night all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Returns the values of the named parameters in the selected tests of the fixture's module, in order, each once: a
    value for a single name, a tuple for several names."""
    calls = [vars(item).get("callspec") for item in request.session.items if item.path == request.path]
    found = [tuple(call.params[n] for n in names) for call in calls if call and {*names} <= {*call.params}]
    return list(dict.fromkeys(values if len(names) > 1 else values[0] for values in found))


def some_nightly(names: Iterable[str], nightly: Container[str]) -> list[Any]:
    """Returns pytest parameters for these names; those in `nightly` are left out of the check of every change."""
    return [pytest.param(name, marks=[pytest.mark.nightly] if name in nightly else []) for name in names]
