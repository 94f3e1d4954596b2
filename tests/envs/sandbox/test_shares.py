"""Several processes of a node share the limits of an environment's programs, and the driver collects their counts."""

from __future__ import annotations

import pytest

from skyrl_mega.envs.sandbox import budget


def test_a_budget_is_divided_among_the_processes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_budgets", {})
    monkeypatch.setattr(budget, "_process_count", 1)
    budget.divide(4)
    assert budget.shared("shared", 1024).total == 256 * budget.MIB
    assert budget.shared("shared", 1024) is budget.shared("shared", 1024)


def test_programs_that_had_to_end_elsewhere_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_budgets", {})
    monkeypatch.setattr(budget, "_ended_in_other_processes", None)
    assert budget.ended() is None, "no sandbox anywhere"
    budget.add_ended(0)
    assert budget.ended() == 0
    budget.add_ended(2)
    budget.shared("here", 1024).count()
    assert budget.ended() == 3
