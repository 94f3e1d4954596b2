"""Options that describe trajectories (`--tokens`, `--environment`, `--turns`, `--like`), shared by `--dry-run` and
`--simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import response_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.trajectories import Trajectories, assumed
from skyrl_mega.report import run_data
from skyrl_mega.simulation.rates import prompts_played
from skyrl_mega.simulation.workload import LogNormal, Recorded, Synthetic, Workload

OPTIONS = ("tokens", "environment", "turns", "like")
NO_OPTIONS = argparse.Namespace(**dict.fromkeys(OPTIONS))
"""Options of a command line without any of `OPTIONS`."""
TIMES = "environment.times"
"""Settings with the assumed seconds of environments."""
SPREAD = 1.0
"""Standard deviation of the logarithm of assumed lengths and of assumed seconds of environments."""
LEAST_SIGNAL = 0.01
"""Lower bound for the share of groups with a signal in estimates; with 0, sampling would never end."""


@dataclass(frozen=True)
class Described:
    """Trajectories of a time estimate, and the source of their properties."""

    trajectories: Trajectories
    """Lengths, environment seconds and share of groups with a signal."""
    lengths: str
    """`assumed`, or the option that gave the lengths."""
    environment: str | None
    """The option or the settings that gave the seconds of environments; None: not counted."""
    signal: str
    """`assumed`, or the option that gave the share of groups with a signal."""
    turns: float | None = None
    """Mean turns; None if unknown."""


def first_option(args: argparse.Namespace | None) -> str | None:
    """Returns the name of the first option that describes the trajectories; None without such an option. The order is
    tokens, environment, turns, like."""
    return next((name for name in OPTIONS if getattr(args, name, None) is not None), None)


def described(config: Config, parallel: ParallelDims, args: argparse.Namespace | None) -> Described:
    """Returns the trajectories of a dry run: as the options and `environment.times` describe them, else assumed.

    Args:
        config: The settings, with `policy.micro_tokens` decided.
        parallel: The policy's grid.
        args: The options of the command line; None without options.

    Raises:
        UserError: An option is wrong.
    """
    usual, times = assumed(config, parallel), config.environment.times
    args = args or NO_OPTIONS
    if first_option(args) is None and not times.given:
        return Described(usual, "assumed", None, "assumed")
    workload = workload_of(config, args)
    length = workload.length
    trajectories = replace(
        usual, read=length.read, written=length.written, sample=_sample(config, workload),
        environment_s=workload.environment_s,
    )  # fmt: skip
    if isinstance(workload, Recorded):
        signal = _signal_of(Path(args.like))
        trajectories = trajectories if signal is None else replace(trajectories, signal=signal)
        trajectories = replace(trajectories, prompt=workload.prompt)
        return Described(trajectories, "--like", "--like", "assumed" if signal is None else "--like", length.answers)
    environment = "--environment" if args.environment is not None else TIMES if times.given else None
    if args.tokens is None:  # lengths stay as assumed, and the longest is at the limit
        capped = tuple((min(tokens, usual.longest), seconds) for tokens, seconds in trajectories.sample)
        trajectories = replace(usual, sample=(*capped, *usual.sample), environment_s=workload.environment_s)
        return Described(trajectories, "assumed", environment, "assumed", length.answers)
    return Described(trajectories, "--tokens", environment, "assumed", length.answers)


def signal_share(rows: Sequence[Mapping[str, float | None]], groups: int) -> float | None:
    """Returns the share of sampled groups with a signal over the steps of a run, from `LEAST_SIGNAL` to 1.

    Returns None if no row has the metric `rollout/groups_differ`.

    Args:
        rows: The rows of the run's metrics.
        groups: Groups trained on in a step (`data.prompts_per_step`).
    """
    kept = sampled = 0.0
    for row in rows:
        differ, left_out = row.get("rollout/groups_differ"), row.get("rollout/groups_left_out")
        if differ is None:
            continue
        if left_out is not None:  # dynamic sampling: the groups trained on have a signal, the others were left out
            taken = groups - (row.get("rollout/groups_missing") or 0.0)
            kept, sampled = kept + taken, sampled + taken + left_out
        else:
            kept, sampled = kept + groups * differ, sampled + groups
    return min(1.0, max(LEAST_SIGNAL, kept / sampled)) if sampled else None


def _signal_of(run: Path) -> float | None:
    """Returns the share of groups with a signal in a run; None if its files do not say."""
    if not (run / "metrics.jsonl").is_file() or not (run / "config.yaml").is_file():
        return None
    data = run_data.read(run)  # not `compose`: secrets are masked, and another version may have written the file
    groups = data.settings.get("data.prompts_per_step")
    return signal_share(data.rows, groups) if isinstance(groups, int) else None


def _sample(config: Config, workload: Workload) -> tuple[tuple[float, float], ...]:
    """Returns tokens and environment seconds of each trajectory of a step, at most as many as `--simulate` plays."""
    random = Random(config.run.seed)
    turns = (
        workload.sample_turns(random, group, sample)
        for group in range(prompts_played(config))
        for sample in range(config.data.samples_per_prompt)
    )
    return tuple((float(sum(turn.written for turn in each)), sum(turn.env_s for turn in each)) for each in turns)


def workload_of(config: Config, args: argparse.Namespace) -> Workload:
    """Returns the workload given by the options; by default trajectories with log-normal lengths around
    `cluster.rates.length_share`, and with the seconds of `environment.times`. The default is a single turn, or with
    `environment.times` the share `cluster.rates.length_share` of `rollout.max_turns`.

    Args:
        config: The settings, with `policy.micro_tokens` decided.
        args: Options `--tokens`, `--environment`, `--turns` and `--like`.

    Raises:
        UserError: An option is wrong, options contradict each other, or the run of `--like` has no trajectories.
    """
    if args.like == "":
        raise UserError(
            "allowed is the folder of a run", key="--like", value="''", fix="give the folder, or leave --like out"
        )
    if args.like:
        if wrong := next(
            (name for name in ("tokens", "environment", "turns") if getattr(args, name) is not None), None
        ):
            raise UserError(
                "--like takes tokens, environment seconds and turns from a run",
                key=f"--{wrong}",
                fix="give only one of the two options",
            )
        return Recorded.of_run(Path(args.like))
    parallel, _ = fit.parallel_of(config)
    sizes, most = batch(config, parallel), response_limit(config.rollout)
    tokens = LogNormal(sizes.generated, SPREAD)
    if args.tokens is not None:
        tokens = LogNormal.parsed(args.tokens, "--tokens", 1, most, "rollout.max_response_tokens")
    longest_s, times = config.rollout.env_timeout_s, config.environment.times
    start, environment, end = (LogNormal(seconds, SPREAD) for seconds in (times.start_s, times.turn_s, times.end_s))
    if args.environment is not None:
        environment = LogNormal.parsed(args.environment, "--environment", 0, longest_s, "rollout.env_timeout_s")
    most_turns = min(config.rollout.max_turns, most)
    usual_turns = max(1, round(config.cluster.rates.length_share * most_turns)) if times.given else 1
    turns = args.turns or usual_turns
    if turns > most_turns:
        limit = "max_turns" if most_turns == config.rollout.max_turns else "max_response_tokens"
        raise UserError(
            f"allowed is at most rollout.{limit} = {most_turns}", key="--turns", value=turns, fix="raise that too"
        )
    read = round(sizes.mean - sizes.generated)
    return Synthetic(read, tokens, environment, turns, most, longest_s, start=start, end=end)
