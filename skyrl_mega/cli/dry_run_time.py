"""Seconds, days and GPU-hours of a dry run, as plain values: three columns, a line for the run, rates with sources."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyrl_mega.cli import workload
from skyrl_mega.config.derived import critic_ranks, engine_ranks
from skyrl_mega.config.pools import engine_cluster, gpus_by_kind
from skyrl_mega.config.sandboxes import evaluation_trajectories, row_count
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic
from skyrl_mega.planner.host_memory import shares
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.planner.placement import nodes
from skyrl_mega.planner.rates import ASSUMED, Rate
from skyrl_mega.planner.run_time import Counts, Planned, RunTime, columns, error_bar
from skyrl_mega.planner.times import mfu
from skyrl_mega.planner.trajectories import Trajectories, sizes_of

DAY, HOUR = 86400.0, 3600.0
LINKS = {
    **dict.fromkeys(("nic_out", "nic_in"), "nic_gb_s"),
    **dict.fromkeys(("fabric_out", "fabric_in"), "fabric_gb_s"),
    "device": "device_gb_s",
}
"""Kind of link of a weight sync → setting in `cluster.topology`."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of the time estimate of a dry run."""

    config: Config
    """The settings with all rates."""
    rates: Sequence[Rate]
    """The rates in use, with their sources and uncertainties."""
    decoder: Decoder
    """The model."""
    parallel: ParallelDims
    """The policy's grid."""
    sync: Mapping[str, Any]
    """Cost of the planned weight sync (`weights.plan.report.values`)."""

    def sync_seconds(self, config: Config) -> float:
        """Returns the seconds of a weight sync, other than the first, with the link bandwidths in `config`.

        Args:
            config: Settings with other values in `cluster.topology`; the transfer plan is that of this object.
        """
        links = (
            seconds * self._link(self.config, kind) / self._link(config, kind)
            for kind, seconds in self.sync["seconds"].items()
        )
        return float(max(links) + self.sync["host_seconds"]["later"])

    @staticmethod
    def _link(config: Config, kind: str) -> float:
        """Returns the speed of a kind of link: policy ranks send, and the engines' nodes receive and forward."""
        cluster = config.cluster if kind == "nic_out" else engine_cluster(config)
        return float(getattr(cluster.topology, LINKS[kind]))


def values(inputs: Inputs, args: argparse.Namespace | None) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the seconds of a mean step by phase, and all values about time for `--json` (`time` of a dry run):
    `trajectories`, `columns`, `run`, `causes`, `rates` and `not_counted`.

    Args:
        inputs: The inputs.
        args: Options that describe the trajectories; None without options.

    Raises:
        UserError: An option is wrong.
    """
    config, parallel = inputs.config, inputs.parallel
    given = workload.described(config, parallel, args)
    mean, is_assumed = given.trajectories, given.lengths == "assumed"
    counts = _counts(config, inputs, mean.signal)
    planned = Planned(inputs.decoder, parallel, inputs.sync_seconds, counts)
    each = columns(config, parallel, mean)
    times = {name: planned.run_time(config, column, is_assumed=is_assumed) for name, column in each.items()}
    bar = error_bar(
        lambda config, column: planned.run_time(config, column, is_assumed=is_assumed).seconds,
        config,
        mean,
        inputs.rates,
        [each["short"], each["limit"]] if is_assumed else [],
        environments=[mean.with_slower_environments(factor) for factor in (1 / ASSUMED, ASSUMED)]
        if given.environment == workload.TIMES
        else [],
        signal=config.algorithm.dynamic_sampling.enabled and given.signal == "assumed",
    )
    time: dict[str, Any] = {
        "trajectories": {
            "lengths": given.lengths,
            "environment": given.environment,
            "signal": given.signal if config.algorithm.dynamic_sampling.enabled else None,
            "signal_share": mean.signal,
            "turns": given.turns,
            "environment_s": mean.environment_s,
        },
        "columns": {name: _column(inputs, each[name], run) for name, run in times.items()},
        "run": _run(config, counts, times["mean"], (bar.low, bar.high)),
        "causes": [asdict(cause) for cause in bar.causes],
        "rates": [asdict(rate) for rate in inputs.rates],
        "not_counted": _not_counted(config, counts, given),
    }
    column = time["columns"]["mean"]
    seconds = {name: value for name, value in column.items() if name not in ("read", "written")}
    return seconds, time


def _column(inputs: Inputs, trajectories: Trajectories, run: RunTime) -> dict[str, float]:
    """Returns a column: tokens of a trajectory, seconds by phase, and speed."""
    config, sizes = sizes_of(inputs.config, inputs.parallel, trajectories)
    engines = 0 if config.cluster.shared else config.rollout.engines * engine_ranks(config.rollout)
    gpus = inputs.parallel.ranks + critic_ranks(config) + engines
    return {
        "read": trajectories.read,
        "written": trajectories.written,
        **run.values,
        "tokens_per_second_per_gpu": sizes.sequences * sizes.mean / run.step.step / gpus,
        "mfu": mfu(config, inputs.decoder, inputs.parallel, sizes),
    }


def _run(config: Config, counts: Counts, time: RunTime, bar: tuple[float, float]) -> dict[str, Any]:
    """Returns steps, days and GPU-hours of the run, with the ends of the error bar."""
    kinds = {} if on_cpu(config) else gpus_by_kind(config)
    gpus = sum(kinds.values())
    ends = [time.seconds * factor for factor in (1.0, *bar)]
    return {
        "steps": time.steps,
        "steps_known": counts.steps is not None,
        "gpus": gpus,
        "gpu_hours_by_kind": {kind: count * ends[0] / HOUR for kind, count in kinds.items()},
        "evaluations": time.evaluations,
        "evaluation_s": time.evaluation,
        "checkpoints": time.checkpoints,
        "checkpoint_s": time.checkpoint,
        "factors": list(bar),
        **{
            name: dict(zip(("estimate", "low", "high"), (end * unit for end in ends), strict=True))
            for name, unit in (("seconds", 1.0), ("days", 1 / DAY), ("gpu_hours", gpus / HOUR))
        },
    }


def _counts(config: Config, inputs: Inputs, signal: float) -> Counts:
    """Returns the number of steps, by `run.steps` and the rows of the data, and the sizes of evaluation and
    checkpoint."""
    written = shares(config, inputs.decoder, inputs.parallel, nodes(config)).node
    return Counts(known_steps(config, signal), evaluation_trajectories(config), written)


def known_steps(config: Config, signal: float = dynamic.SIGNAL_SHARE) -> int | None:
    """Returns the number of RL steps by `run.steps` and the rows of the data; None if both are unknown. `signal` is the
    share of groups with differing rewards."""
    rows = [row_count(file) for file in config.data.train]
    steps = [config.run.steps]
    if rows and None not in rows:
        steps.append(sum(n or 0 for n in rows) * config.run.epochs // sum(dynamic.rounds(config, signal)))
    return min((n for n in steps if n is not None), default=None)


def _not_counted(config: Config, counts: Counts, given: workload.Described) -> list[str]:
    """Returns the parts of a run without seconds in the estimate."""
    missing = ["start-up and restarts"]
    if given.environment is None:
        missing.append("the environments' own time (--environment MEAN,SIGMA --turns N, or --like RUN)")
    if config.data.eval and not counts.evaluated and (config.evaluation.every or config.evaluation.before):
        missing.append("evaluations (data.eval is not here, and evaluation.limit is not set)")
    if config.warmup.steps:
        missing.append("the supervised warm-up")
    return missing
