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
        "cases": {
            "as it is": {"dry_run_s": 3.0, "measured_s": 3.2, "bar_s": [2.5, 3.6]},
            "2 engines": {"dry_run_s": 2.0, "measured_s": 2.5, "bar_s": [1.7, 2.4]},
            "reference": {"dry_run_s": 4.0, "measured_s": 3.3, "bar_s": [3.4, 4.8]},
        },
    }
    lines = {line.split()[0]: line for line in table(result).splitlines()[1:-1]}
    assert lines["generate"].endswith("within 20 %") and lines["train"].endswith("off")
    assert lines["logprobs"].split()[-1] == "10.00" and lines["sync"].split()[-1] == "1.00", "too short to be judged"
    assert lines["as"].split() == ["as", "it", "is", "3.000", "3.200", "0.94", "2.50", "to", "3.60", "s"]
    assert lines["2"].endswith("outside") and lines["reference"].endswith("outside")
    assert table(result).endswith("holds in 1 of 3 cases")
