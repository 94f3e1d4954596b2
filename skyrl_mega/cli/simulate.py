"""`--simulate`: comparison of asynchrony modes, splits of the GPUs and engine sizes in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.cli import dry_run, simulate_choices, simulate_text
from skyrl_mega.cli.simulate_choices import EXPLORED, MODES, TENSORS, Choice, Refused, engines, with_given_fraction
from skyrl_mega.cli.simulate_text import NOISE, Comparison, SimulatedRow
from skyrl_mega.cli.workload import workload_of
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check_values
from skyrl_mega.config.checks.engines import check_topology
from skyrl_mega.config.command import DONE
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit, micro_tokens, rates
from skyrl_mega.planner.candidates import Change, ranked
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import simulate
from skyrl_mega.simulation.workload import Workload


def run(config: Config, args: argparse.Namespace) -> int:
    """Simulates the settings and prints the report: tables of asynchrony modes, splits and engines, then advice; with
    `--json` as a JSON object. Returns the exit code 0.

    Args:
        config: The settings.
        args: Options of `--simulate`.

    Raises:
        UserError: The settings cannot be planned or simulated, or an option is wrong.
    """
    check_topology(config)
    if on_cpu(config):
        raise UserError(
            "--simulate knows the speeds of GPUs only (cluster.rates)",
            key="cluster.device",
            value="cpu",
            fix="give cluster.device=cuda; cluster.nodes and cluster.gpus_per_node set the number of GPUs",
        )
    check_playable(config)
    check_values(Config(asynchrony=config.asynchrony))  # later checks only see other modes
    hf, _ = dry_run.checked(simulate_choices.synchronous(config).config)
    given = simulate_choices.synchronous(config)
    comparison = _compare(config, given, Simulator(hf, workload_of(config, args)))
    print(json.dumps(simulate_text.values(comparison)) if args.json else simulate_text.text(comparison))
    return DONE


@raising
def check_playable(config: Config) -> Refusals:
    """Rejects settings not supported by the simulation.

    Raises:
        UserError: The advantage estimator needs greedy answers.
    """
    if config.algorithm.advantage_traits.greedy:
        why = "--simulate does not play the greedy answers that engines write beside the samples"
        yield "algorithm.advantage", f"{why}, so its step would be too short; give another advantage to simulate with"


@dataclass
class Simulator:
    """Simulates every choice with the same trajectories, and prints a line before each simulation on standard error."""

    hf: Mapping[str, Any]
    """The model's config.json."""
    workload: Workload
    """The simulated trajectories."""
    before: Callable[[Choice], None] = lambda choice: None
    """Called before each simulation; an exception ends the comparison."""
    finished: list[SimulatedRow] = field(default_factory=list)
    """All rows simulated so far."""
    started: int = 0
    """Number of simulations, the current one included."""
    expected: int = 0
    """Estimated number of all simulations; 0 if unknown."""

    def expect(self, more: int) -> None:
        """Sets `expected`: the simulations so far plus `more`."""
        self.expected = self.started + more

    def progress(self, choice: Choice) -> str:
        """Counts a simulation and returns the line that announces it; prints nothing."""
        self.started += 1
        total = f" of about {max(self.expected, self.started)}" if self.expected else ""
        return f"simulate {self.started}{total}: {simulate_text.describe(choice)} …"

    def row(self, choice: Choice) -> SimulatedRow:
        """Simulates a choice, and returns the choice with its outcome. Calls `before`, prints a line to standard error,
        and adds the result to `finished`, the list of all results.

        Raises:
            UserError: `cluster.rates_file` is wrong. Errors raised by `before` pass through.
        """
        self.before(choice)
        print(self.progress(choice), file=sys.stderr, flush=True)
        config, _ = rates.with_measured(micro_tokens.with_micro_tokens(choice.config, self.hf))
        parallel, _ = fit.parallel_of(config)
        speeds = Rates.planned(config, architecture(self.hf).describe(self.hf), parallel, self.workload.length)
        steps = simulate_text.measured_steps(choice.most)
        self.finished.append(SimulatedRow(choice, simulate(config, speeds, self.workload, steps=steps)))
        return self.finished[-1]

    def rows(self, config: Config, splits: Sequence[Change], mode: str, most: int) -> list[SimulatedRow]:
        """Simulates a mode in each split that can run it; returns a row for each, in the order of `splits`; [] if none
        can. Prints a line to standard error before each simulation, and adds each row to `finished`.

        Args:
            config: The given settings.
            splits: Divisions of the GPUs, as changes of the settings.
            mode: `asynchrony.mode`.
            most: `asynchrony.max_staleness`.

        Raises:
            UserError: `cluster.rates_file` is wrong. Errors raised by `before` pass through.
        """
        choices = (simulate_choices.choice(config, split, mode, most, self.hf) for split in splits)
        return [self.row(each) for each in choices if isinstance(each, Choice)]


def _compare(config: Config, given: Choice, simulator: Simulator) -> Comparison:
    """Compares the given settings, splits, engine sizes and modes.

    Splits are compared in the mode chosen by `EXPLORED`, other engines in the best split, and all modes with the best
    engines. If no split fits, only the given GPUs are compared, and the result says why.
    """
    hf = simulator.hf
    print("look for splits of the GPUs that fit …", file=sys.stderr, flush=True)
    splits = simulate_choices.splits(config, hf)
    shared = engines(config, (), hf, [config.rollout.memory_fraction]) if config.cluster.shared else []
    simulator.expect(1 + len(shared) + len(splits) + (len(TENSORS) + len(MODES) if splits else 0))
    first = simulator.row(given)
    shared_rows = simulator.rows(config, shared, "off", 0)
    compared = split_rows(config, splits, simulator)
    best, engine_rows = _with_engines(config, compared, simulator) if compared else (first, [])
    rows, modes = [first], [*simulate_choices.modes(config, best.choice.split, hf, splits_fit=bool(splits))]
    simulator.expect(sum(isinstance(each, Choice) and each != best.choice for each in modes))
    for each in modes:
        if isinstance(each, Choice) and each.config not in [row.choice.config for row in rows]:
            rows.append(best if each == best.choice else simulator.row(each))
    return Comparison(
        config,
        rows,
        splits=compared,
        engine_sizes=engine_rows,
        shared_engines=shared_rows,
        refused=[each for each in modes if isinstance(each, Refused)],
        environment_s=simulator.workload.environment_s,
        length=simulator.workload.length,
        no_split=None if splits else simulate_choices.misfit_reason(config, hf),
    )


def _with_engines(
    config: Config, compared: Sequence[SimulatedRow], simulator: Simulator
) -> tuple[SimulatedRow, list[SimulatedRow]]:
    """Simulates other engines in the best split. Returns the best of all rows, and the rows of the other engines.

    Args:
        config: The given settings.
        compared: Rows of the splits, all in the same mode.
        simulator: Simulates the rows.
    """
    best = min(compared, key=_seconds)
    explored = best.choice.mode, best.choice.most
    other_engines = engines(config, best.choice.split, simulator.hf)
    simulator.expect(len(other_engines) + len(MODES))
    engine_rows = sorted(simulator.rows(config, other_engines, *explored), key=_seconds)
    tried = [best, *engine_rows]
    plain = with_given_fraction(config, min(tried, key=_seconds).choice.split, [row.choice.split for row in tried])
    engine_rows = [*simulator.rows(config, plain, *explored), *engine_rows]
    return _nearly_best([best, *engine_rows]), engine_rows


def split_rows(config: Config, splits: Sequence[Change], simulator: Simulator) -> list[SimulatedRow]:
    """Simulates all splits in the first mode of `EXPLORED` that can run in any split, and returns a row for each split
    that can run the mode, in the order of `splits`; [] if no mode can run. Prints a line to standard error before each
    simulation. Raises UserError if `cluster.rates_file` is wrong; errors of `simulator.before` pass through."""
    return next(filter(None, (simulator.rows(config, splits, mode, most) for mode, most in EXPLORED)), [])


def _nearly_best(rows: Sequence[SimulatedRow]) -> SimulatedRow:
    """Returns, among rows within noise of the fastest, the one that changes the fewest settings."""
    return next(ranked(rows, _seconds, NOISE, lambda row: (len(row.choice.change), _seconds(row))))


def _seconds(row: SimulatedRow) -> float:
    return row.outcome.seconds
