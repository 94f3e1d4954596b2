"""One plan of each weight sync for the tests of commands, which plan the same few models again and again.

The plans themselves are tested in `tests/weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.sync_plan import SyncInputs

PLANS: dict[str, Plan] = {}
MOST = 6
"""Number of plans kept; a plan of a large model takes tens of megabytes."""
make = SyncInputs.plan


def _plan(inputs: SyncInputs) -> Plan:
    key = json.dumps(asdict(inputs), sort_keys=True)
    plan = PLANS.pop(key, None) or make(inputs)
    PLANS[key] = plan  # the newest last
    if len(PLANS) > MOST:
        del PLANS[next(iter(PLANS))]
    return plan


@pytest.fixture(scope="module", autouse=True)
def remembered_plans() -> Iterator[None]:
    """Plans a sync once for equal inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncInputs, "plan", _plan)
        yield
