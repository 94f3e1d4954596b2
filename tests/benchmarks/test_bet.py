"""Fits and the table of `benchmarks.bet`; a whole bet takes minutes."""

from __future__ import annotations

import pytest

from benchmarks.bet import fitted, table


def test_rates_are_recovered_from_seconds() -> None:
    costs = [[1.0, 2.0], [2.0, 2.5], [5.0, 3.0]]
    assert fitted(costs, [3 * a + 0.5 * b for a, b in costs]) == pytest.approx([3.0, 0.5])


def test_a_rate_is_never_negative() -> None:
    """Fits seconds that fall with the second cost: the first rate alone is taken."""
    first, second = fitted([[1.0, 1.0], [2.0, 4.0]], [1.0, 1.9])
    assert second == 0.0 and 0.9 < first < 1.0


def test_the_table_judges_what_takes_time() -> None:
    seconds = {"generate": 2.0, "logprobs": 0.01, "train": 1.0, "sync": 0.1, "step": 3.2}
    dry = seconds | {"logprobs": 0.1, "train": 1.5, "step": 3.0}
    result = {
        "dry_run_s": dry,
        "simulated_s": {"generate": 2.1, "step": 3.1},
        "measured_s": seconds,
        "steps_s": [2.0, 3.1, 3.3, 5.0],
        "bar_s": [2.5, 3.6],
        "inside": 2,
    }
    lines = {line.split()[0]: line for line in table(result).splitlines()[1:-1]}
    assert lines["generate"].endswith("within 20 %") and lines["train"].endswith("off")
    assert lines["logprobs"].split()[-1] == "10.00" and lines["sync"].split()[-1] == "1.00", "too short to be judged"
    assert table(result).endswith("holds in 2 of 4 steps")
