"""`--simulate`: comparison of asynchrony modes, splits of the GPUs and engine sizes in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.cli import dry_run, simulate_choices, simulate_text
from skyrl_mega.cli.simulate_choices import EXPLORED, MODES, Choice, engines, plainer
from skyrl_mega.cli.simulate_text import CHANCE, Comparison, Refused, Row
from skyrl_mega.config.asynchrony_checks import MOST_SIMULATED
from skyrl_mega.config.checks import check_topology, check_values
from skyrl_mega.config.command import DONE
from skyrl_mega.config.derived import draws_greedy, engine_data, response_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit, micro_tokens
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.fixes import Change
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import simulate
from skyrl_mega.simulation.workload import Drawn, LogNormal, Recorded, Workload


def run(config: Config, args: argparse.Namespace) -> int:
    """Simulates and prints the tables.

    Raises:
        UserError: The settings cannot be planned or simulated, or an option is wrong.
    """
    check_topology(config)
    if on_cpu(config):
        raise UserError(
            "cluster.device = cpu: rates are known of GPUs alone (cluster.rates); give cluster.device=cuda with the "
            "GPUs of cluster.nodes and cluster.gpus_per_node"
        )
    if draws_greedy(config.algorithm):
        raise UserError(
            f"algorithm.advantage = {config.algorithm.advantage}: --simulate does not play the greedy answers that "
            "engines write beside the samples, so its step would be too short; give another advantage to simulate with"
        )
    if (data := engine_data(config.rollout)) > 1:
        raise UserError(
            f"rollout.options.data_parallel_size = {data}: not yet available in a run, so --simulate advises none; "
            "leave it out"
        )
    check_values(Config(asynchrony=config.asynchrony))  # later checks only see other modes
    hf, _ = dry_run.checked(simulate_choices.off(config).config)
    as_it_is = simulate_choices.off(config)
    compared = _compare(config, as_it_is, _Stage(hf, workload_of(config, args)))
    print(json.dumps(simulate_text.values(compared)) if args.json else simulate_text.text(compared))
    return DONE


def workload_of(config: Config, args: argparse.Namespace) -> Workload:
    """Returns the workload given by the options; by default single turns with log-normal lengths around
    `cluster.rates.length_share`.

    Raises:
        UserError: An option is wrong.
    """
    if args.like == "":
        raise UserError("--like '': allowed is the folder of a run; give it, or leave --like out")
    if args.like:
        if wrong := next(
            (name for name in ("tokens", "environment", "turns") if getattr(args, name) is not None), None
        ):
            raise UserError(f"--{wrong}: --like takes all of it from a run; give one of them")
        return Recorded.of_run(Path(args.like))
    parallel, _ = fit.parallel_of(config)
    made, most = batch(config, parallel), response_limit(config.rollout)
    tokens = LogNormal(made.generated, 1.0)
    if args.tokens is not None:
        tokens = LogNormal.parsed(args.tokens, "--tokens", 1, most, "rollout.max_response_tokens")
    longest_s = config.rollout.env_timeout_s
    told = "0" if args.environment is None else args.environment
    environment = LogNormal.parsed(told, "--environment", 0, longest_s, "rollout.env_timeout_s")
    turns, most_turns = args.turns or 1, min(config.rollout.max_turns, most)
    if turns > most_turns:
        raise UserError(f"--turns {turns}: allowed is at most rollout.max_turns = {most_turns}; raise that too")
    return Drawn(round(made.mean - made.generated), tokens, environment, turns, most, longest_s)


@dataclass(frozen=True)
class _Stage:
    """Simulates every choice with the same trajectories."""

    hf: Mapping[str, Any]
    workload: Workload

    def row(self, choice: Choice) -> Row:
        """Simulates a choice and returns it with the outcome."""
        print(f"simulate {simulate_text.what(choice)} …", file=sys.stderr)
        d, config = architecture(self.hf).describe(self.hf), micro_tokens.decided(choice.config, self.hf)
        parallel, _ = fit.parallel_of(config)
        rates = Rates.planned(config, d, parallel, self.workload.length)
        return Row(choice, simulate(config, rates, self.workload, steps=simulate_text.measured(choice.most)))

    def rows(self, config: Config, splits: Sequence[Change], mode: str, most: int) -> list[tuple[Change, Row]]:
        """Simulates a mode in each suitable split."""
        choices = ((split, simulate_choices.choice(config, split, mode, most, self.hf)) for split in splits)
        return [(split, self.row(each)) for split, each in choices if isinstance(each, Choice)]


def _compare(config: Config, as_it_is: Choice, stage: _Stage) -> Comparison:
    """Compares the given settings, splits, engine sizes and modes.

    Splits are compared in the mode chosen by `EXPLORED`, other engines in the best split, and all modes with the best
    engines.

    Raises:
        UserError: No split fits.
    """
    splits = simulate_choices.splits(config, stage.hf)
    if not splits:
        why = simulate_choices.refused(config, stage.hf)
        raise UserError(
            f"cluster.nodes = {config.cluster.nodes}: no split of its GPUs into policy and engines fits; give more "
            "nodes, or see what --suggest finds" + (f"; {why}" if why else "")
        )
    first = stage.row(as_it_is)
    shared = simulate_choices.on_shared(config, stage.hf) if config.cluster.shared else []
    recut = [row for _, row in stage.rows(config, shared, "off", 0)]
    tried = next(filter(None, (stage.rows(config, splits, mode, most) for mode, most in EXPLORED)))
    best, of_best = min(tried, key=_seconds)
    explored = of_best.choice
    sized = sorted(stage.rows(config, engines(config, best, stage.hf), explored.mode, explored.most), key=_seconds)
    of_engines = [(best, of_best), *sized]
    fastest, _ = min(of_engines, key=_seconds)
    plain = stage.rows(
        config, plainer(config, fastest, [split for split, _ in of_engines]), explored.mode, explored.most
    )
    best, of_best = _nearly_best([*of_engines, *plain])
    rows, refused = [first], []
    for each in _modes(config, best, stage.hf):
        if isinstance(each, Refused):
            refused.append(each)
        elif each.config not in [row.choice.config for row in rows]:
            rows.append(of_best if each == of_best.choice else stage.row(each))
    of_splits, others = ([row for _, row in each] for each in (tried, [*plain, *sized]))
    return Comparison(
        config,
        rows,
        tried=of_splits,
        sized=others,
        recut=recut,
        refused=refused,
        environment_s=stage.workload.environment_s,
        length=stage.workload.length,
    )


def _modes(config: Config, split: Change, hf: Mapping[str, Any]) -> Iterator[Choice | Refused]:
    """Yields the given settings with their asynchrony, then all modes in a split."""
    if config.asynchrony.mode != "off":
        most, as_given = config.asynchrony.max_staleness, simulate_choices.given(config, hf)
        if most > MOST_SIMULATED:
            yield Refused(
                config.asynchrony.mode, most, f"it would take too long: --simulate plays {MOST_SIMULATED} at most"
            )
        elif isinstance(as_given, UserError):
            yield Refused(config.asynchrony.mode, most, f"(the settings as they are) {as_given}")
        else:
            yield as_given
    for mode, most in MODES:
        each = simulate_choices.choice(config, split, mode, most, hf)
        yield Refused(mode, most, str(each)) if isinstance(each, UserError) else each


def _nearly_best(tried: Sequence[tuple[Change, Row]]) -> tuple[Change, Row]:
    """Returns, among results within noise of the fastest, the one that changes the fewest settings."""
    fastest = min(map(_seconds, tried))
    near = [one for one in tried if _seconds(one) <= CHANCE * fastest]
    return min(near, key=lambda one: (len(one[1].choice.change), _seconds(one)))


def _seconds(one: tuple[Change, Row]) -> float:
    return one[1].outcome.seconds
