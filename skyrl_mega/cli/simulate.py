"""`--simulate`: modes of `asynchrony` and splits of the GPUs, beside each other in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_mega.cli import dry_run, inputs
from skyrl_mega.cli.dry_run_text import aligned
from skyrl_mega.config.checks import check
from skyrl_mega.config.command import DONE
from skyrl_mega.config.derived import engine_ranks, policy_ranks, response_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit, micro_tokens
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.planner.moves import residency_time
from skyrl_mega.simulation.simulate import Outcome, Rates, simulate, values, with_mode
from skyrl_mega.simulation.workload import Drawn, LogNormal, Recorded, Workload

SPLITS = 6
"""Numbers of policy ranks that are tried."""
STEPS = 4
MODES = (("off", 0), ("one_step", 1), ("full", 1), ("full", 2), ("full", 4))
HEAD = (
    "mode",
    "staleness",
    "policy",
    "engines",
    "s a step",
    "policy waits",
    "engines idle",
    "filled",
    "mean staleness",
)

Row = tuple[str, int, Config, Outcome]


def run(config: Config, args: argparse.Namespace) -> int:
    """Simulates, and prints the tables.

    Raises:
        UserError: The settings cannot be planned, or an option is wrong.
    """
    config = _synchronous(config)
    if on_cpu(config):
        raise UserError(
            "cluster.device = cpu: rates are known of GPUs alone (cluster.rates); give cluster.device=cuda with the "
            "GPUs of cluster.nodes and cluster.gpus_per_node"
        )
    hf, _ = dry_run.checked(config)
    config = micro_tokens.decided(config, hf)
    workload = workload_of(config, args)
    rows = [_row("off", 0, config, hf, workload)]
    apart = list(splits(config, hf))
    if not apart:
        raise UserError(
            f"cluster.nodes = {config.cluster.nodes}: no split of its GPUs into policy and engines fits; give more "
            "nodes, or see what --suggest finds"
        )
    tried = [_row("full", 2, split, hf, workload) for split in apart]
    best = min(tried, key=lambda row: row[3].seconds)[2]
    rows += [_row(mode, most, best, hf, workload) for mode, most in MODES if (mode, most) != ("full", 2)]
    rows += [row for row in tried if row[2] is best]
    rows[1:] = sorted(rows[1:], key=lambda row: MODES.index(row[:2]))
    if args.json:
        print(json.dumps({"modes": [_values(row) for row in rows], "splits": [_values(row) for row in tried]}))
    else:
        print(text(rows, tried, config))
    return DONE


def workload_of(config: Config, args: argparse.Namespace) -> Workload:
    """As the options say; without any, single turns of log-normal lengths around `cluster.rates.length_share`."""
    if args.like:
        if wrong := next(
            (name for name in ("tokens", "environment", "turns") if getattr(args, name) is not None), None
        ):
            raise UserError(f"--{wrong}: --like takes all of it from a run; give one of them")
        return Recorded.of_run(Path(args.like))
    parallel, _ = fit.parallel_of(config)
    made = batch(config, parallel)
    tokens = LogNormal.parsed(args.tokens, "--tokens") if args.tokens else LogNormal(made.generated, 1.0)
    environment = LogNormal.parsed(args.environment or "0", "--environment")
    turns = 1 if args.turns is None else int(args.turns)
    if turns < 1:
        raise UserError(f"--turns {turns}: allowed is an integer of at least 1")
    return Drawn(round(made.mean - made.generated), tokens, environment, turns, response_limit(config.rollout))


def splits(config: Config, hf: Mapping[str, Any]) -> Iterator[Config]:
    """The same GPUs, some for the policy and the others for engines, where both fit."""
    total, worker = config.cluster.nodes * config.cluster.gpus_per_node, engine_ranks(config.rollout)
    possible = []
    for ranks in range(1, total):
        engines = (total - ranks) // worker
        tried = replace(
            config,
            cluster=replace(config.cluster, shared=False),
            residency=replace(config.residency, keep=None),
            policy=replace(config.policy, ranks=ranks),
            rollout=replace(config.rollout, engines=engines),
        )
        if engines and ranks + engines * worker == total and _fits(tried, hf):
            possible.append(tried)
    step = -(-len(possible) // SPLITS)
    yield from possible[::step] if step else []


def _fits(config: Config, hf: Mapping[str, Any]) -> bool:
    try:
        check(config, planned=True)
        inputs.check_layouts(config, hf)
        fit.check(config, hf, strict=True)
    except UserError:
        return False
    return True


def _synchronous(config: Config) -> Config:
    return replace(config, asynchrony=AsynchronyConfig())


def _row(mode: str, most: int, config: Config, hf: Mapping[str, Any], workload: Workload) -> Row:
    d = architecture(hf).describe(hf)
    parallel, _ = fit.parallel_of(config)
    rates = Rates.planned(config, d, parallel)
    rates = replace(rates, sync_s=rates.sync_s + residency_time(config, d, parallel))
    where = "shared" if config.cluster.shared else f"{policy_ranks(config)} + {config.rollout.engines} engines"
    print(f"simulate {mode} {most}, {where} …", file=sys.stderr)
    return mode, most, config, simulate(with_mode(config, mode, most), rates, workload, steps=STEPS)


def text(rows: list[Row], tried: list[Row], config: Config) -> str:
    """What a person reads."""
    whole = "on shared GPUs" if config.cluster.shared else "as the settings split them"
    lines = [
        f"modes of asynchrony on {config.cluster.nodes} · {config.cluster.gpus_per_node} GPUs; first {whole}, then in "
        "the best split:",
        *aligned([HEAD, *(_cells(row) for row in rows)]),
    ]
    if len(tried) > 1:
        lines += ["", "splits, with mode=full and max_staleness=2:", *aligned([HEAD, *(_cells(row) for row in tried)])]
    fastest = min(rows, key=lambda row: row[3].seconds)
    mode, most, best, outcome = fastest
    lines += [
        "",
        f"a step takes {rows[0][3].seconds / outcome.seconds:.2f} times less with asynchrony.mode={mode} "
        f"asynchrony.max_staleness={most} cluster.shared=false residency.keep=null "
        f"policy.ranks={policy_ranks(best)} rollout.engines={best.rollout.engines}",
        "nothing was started (--simulate): seconds are estimates from cluster.rates; who waits for whom is what the "
        "real service and router do, in virtual time",
    ]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    mode, most, config, o = row
    policy = f"{policy_ranks(config)} ranks" + (", shared" if config.cluster.shared else "")
    return (
        mode,
        str(most),
        policy,
        f"{config.rollout.engines} × TP{config.rollout.tensor}",
        f"{o.seconds:,.0f}",
        f"{o.policy_waits:.0%}",
        f"{o.engines_idle:.0%}",
        f"{o.engines_filled:.0%}",
        f"{o.staleness:.2f}",
    )


def _values(row: Row) -> dict[str, Any]:
    mode, most, config, outcome = row
    places = {"policy.ranks": policy_ranks(config), "rollout.engines": config.rollout.engines}
    return {"mode": mode, "max_staleness": most, "shared": config.cluster.shared, **places, **values(outcome)}
