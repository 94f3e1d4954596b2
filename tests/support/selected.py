"""Parameters of the tests that a run has selected, for fixtures that compute all cases at once."""

from __future__ import annotations

from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Returns the values of the named parameters in the selected tests of the fixture's module, in order, each once: a
    value for a single name, a tuple for several names."""
    calls = [vars(item).get("callspec") for item in request.session.items if item.path == request.path]
    found = [tuple(call.params[n] for n in names) for call in calls if call and {*names} <= {*call.params}]
    return list(dict.fromkeys(values if len(names) > 1 else values[0] for values in found))
