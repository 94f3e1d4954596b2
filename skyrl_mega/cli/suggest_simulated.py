"""Simulated rows of `--suggest`: synchronous settings beside asynchronous ones, as `--simulate` plays them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyrl_mega.cli import simulate, simulate_choices, simulate_text
from skyrl_mega.cli.simulate_choices import Choice
from skyrl_mega.cli.suggest_rows import Row, Rows, as_suggestion, row
from skyrl_mega.cli.workload import workload_of
from skyrl_mega.common.errors import UserError
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.candidates import Change

SECONDS = 10.0
"""Maximum processor time of all simulations; none starts later."""


@dataclass(frozen=True)
class Simulated:
    """Rows of `--suggest` with simulated instead of estimated seconds."""

    rows: Sequence[tuple[str, Row]]
    """Label and row: synchronous rows by number, then an asynchronous mode in the fastest split, and in other splits
    faster than the first synchronous row."""
    change: Change
    """Difference of the fastest asynchronous row from its base; empty without such a row."""
    base: str
    """Number of the row whose GPUs are split."""
    note: str | None
    """Reason for missing rows; None if all splits were simulated."""


class _TimeOver(Exception):
    """The time of the simulations is over, or the user has ended them."""


def simulated(hf: Mapping[str, Any], rows: Rows, args: argparse.Namespace, keep_going: Callable[[], bool]) -> Simulated:
    """Simulates rows 0 (the given settings) and 1 of the search, and an asynchronous mode in each split of the GPUs.

    A split divides the GPUs between policy and engines. Row 0 is left out if the given settings do not fit, or have
    another number of GPUs than row 1. Of the asynchronous rows the result has the fastest, and every other row faster
    than the first synchronous row. Without a simulated asynchronous mode the result has no rows; the note says why.

    Prints a line to standard error before each simulation. No simulation starts after `SECONDS` of processor time, or
    once `keep_going` returned False; the note then says so. An invalid option raises no error, but is in the note.

    Args:
        hf: The model's config.json.
        rows: The rows of the search, with at least one choice.
        args: The options `--tokens`, `--environment`, `--turns` and `--like`, which describe the trajectories.
        keep_going: Returns False to end the simulations.
    """
    first = rows.choices[0]
    numbered = {"0": rows.given, "1": first} if rows.given and rows.given.gpus == first.gpus else {"1": first}
    configs = {number: each.suggestion.config for number, each in numbered.items() if each}
    number, base = next(iter(configs.items()))
    end, played, note = time.process_time() + SECONDS, list[simulate_text.SimulatedRow](), None

    def limit(_: Choice) -> None:
        if time.process_time() > end or not keep_going():
            raise _TimeOver

    try:
        simulate.check_playable(base)
        simulator = simulate.Simulator(hf, workload_of(base, args), limit, played)
        for config in configs.values():
            simulator.row(simulate_choices.synchronous(config))
        simulate.split_rows(base, simulate_choices.splits(base, hf), simulator)
    except UserError as error:
        note = f"no simulation of asynchronous settings: {error}"
    except _TimeOver:
        note = (
            f"simulations ended after {SECONDS:.0f} s of a core or by Ctrl-C; --simulate compares all modes and splits"
        )
    ahead = sorted((each for each in played if each.choice.most), key=lambda each: each.outcome.seconds)
    ahead = [each for i, each in enumerate(ahead) if i == 0 or each.outcome.seconds < played[0].outcome.seconds]
    if not ahead and note is None:
        note = "no asynchronous mode can run in any split; --simulate says why"
    synchronous = zip(configs, (each for each in played if not each.choice.most), strict=False)
    labelled = [*synchronous, *((f"{each.choice.mode} {each.choice.most}", each) for each in ahead)]
    measured = [(label, _row(each, hf)) for label, each in labelled] if ahead else []
    return Simulated(measured, ahead[0].choice.change if ahead else (), number, note)


def _row(played: simulate_text.SimulatedRow, hf: Mapping[str, Any]) -> Row:
    """Returns simulated settings with their costs and simulated seconds."""
    decoder = architecture(hf).describe(hf)
    suggestion = as_suggestion(played.choice.config, hf, decoder)
    return row(replace(suggestion, seconds=played.outcome.seconds), decoder)
