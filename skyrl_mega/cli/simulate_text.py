"""Output of `--simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from skyrl_mega.cli.simulate_choices import Choice, Refused
from skyrl_mega.common.tables import aligned
from skyrl_mega.config.derived import max_open_trajectories, policy_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.planner.candidates import as_arguments, changed, ranked
from skyrl_mega.simulation.rates import prompts_played
from skyrl_mega.simulation.simulate import Outcome
from skyrl_mega.simulation.workload import Length

STEPS = 4
"""Minimum number of steps measured per choice. With high staleness more steps are measured: groups requested together
may finish together, and training must pass over them twice."""
NOISE = 0.02
"""Relative difference of step times below which the difference is noise."""
LIMITING, DOMINANT = 0.8, 0.9
"""Shares of a step that environment calls take: from the first on they limit the step; from the second on no other
change is worthwhile, as a step could be at most a ninth shorter."""
HEAD = (
    "",
    "mode",
    "at most",
    "policy",
    "engines",
    "memory",
    "s a step",
    "policy waits",
    "engines idle",
    "places used",
    "staleness",
)
EXCLUSIVE_COLUMNS = ("policy_waits", "engines_idle")
"""Columns without meaning if policy and engines share GPUs."""
LEGEND = (
    "* what is advised; at most: asynchrony.max_staleness, and the staleness that came of it is the mean of tokens; "
    "memory: rollout.memory_fraction; policy waits, engines idle: shares of the time (on shared GPUs they take turns); "
    "places used: of the sequences that an engine can run at once"
)


@dataclass(frozen=True)
class SimulatedRow:
    """Choice and simulated outcome."""

    choice: Choice
    """The simulated settings."""
    outcome: Outcome
    """Seconds of a step, waiting shares and staleness by the simulation."""


@dataclass(frozen=True)
class Comparison:
    """All results of `--simulate`."""

    config: Config
    """The given settings."""
    rows: Sequence[SimulatedRow]
    """The given settings without and with asynchrony, then the modes in the best split with the best engines."""
    splits: Sequence[SimulatedRow]
    """All compared splits."""
    engine_sizes: Sequence[SimulatedRow]
    """Engines of other sizes, or with more memory, in the best split."""
    shared_engines: Sequence[SimulatedRow]
    """Engines of other sizes on shared GPUs, without asynchrony."""
    refused: Sequence[Refused]
    """Modes of asynchrony that the checks of a run refuse, each with the reason."""
    environment_s: float
    """Mean environment seconds per trajectory."""
    length: Length
    """Mean length of a trajectory."""
    no_split: str | None = None
    """Reason why no split of the GPUs fits; None if a split fits."""

    @property
    def best(self) -> SimulatedRow:
        """Row to recommend: one of the rows at most `NOISE` (relative) slower than the fastest.

        Prefers the given settings, then the given settings without asynchrony, then least staleness and fewest changes.
        """

        def preference(row: SimulatedRow) -> tuple[Any, ...]:
            change = row.choice.change
            return bool(change), row is not self.rows[0], row.choice.most, len(change), row.outcome.seconds

        return next(ranked(self.all_rows, lambda row: row.outcome.seconds, NOISE, preference))

    @property
    def environments_bound(self) -> bool:
        """True if environment calls take at least the share `DOMINANT` of the step in every row."""
        return all(row.outcome.calls_filled >= DOMINANT for row in self.all_rows)

    @property
    def all_rows(self) -> list[SimulatedRow]:
        """Simulated rows of all tables."""
        return [*self.rows, *self.shared_engines, *self.splits, *self.engine_sizes]

    @property
    def given(self) -> SimulatedRow | None:
        """Row of the given settings with their asynchrony; None if they are synchronous or cannot run."""
        if self.config.asynchrony.mode == "off":
            return None
        return next((row for row in self.rows if row.choice.config == self.config), None)

    @property
    def trajectories(self) -> int:
        """Number of trajectories simulated per step; may be less than in the run."""
        return prompts_played(self.config) * self.config.data.samples_per_prompt


def measured_steps(most: int) -> int:
    """Returns the number of steps to simulate for a choice with `asynchrony.max_staleness` = `most`."""
    return max(STEPS, 2 * (most + 1))


def describe(choice: Choice) -> str:
    """Describes a choice to simulate in a few words: asynchrony mode with `max_staleness`, GPUs of policy and engines,
    number and tensor parallelism of the engines, and their memory fraction."""
    rollout = choice.config.rollout
    return (
        f"{_named(choice.mode, choice.most)}, {_gpus_text(choice.config)}, {rollout.engines} × TP{rollout.tensor} with "
        f"{rollout.memory_fraction:g} of the memory"
    )


def text(c: Comparison) -> str:
    """Returns the report of `--simulate` as text for a terminal: tables of the simulated asynchrony modes, splits of
    GPUs and engine sizes, then the advice and the limits of the simulation."""
    cluster = c.config.cluster
    pool = cluster.pools.engines
    apart = f" and {pool.nodes} · {pool.gpus_per_node} {pool.gpu} for engines" if pool else ""
    gpus = f"{cluster.nodes} · {cluster.gpus_per_node} GPUs{apart}; {'first ' if c.splits else ''}{_given_text(c)}"
    table = partial(_table, None if c.environments_bound else c.best.choice)
    lines = [
        f"a trajectory has {c.length.answers:,.1f} turns, {c.length.written:,.0f} tokens that are written, "
        f"{c.length.read:,.0f} that are read, and {c.environment_s:,.1f} s of its environment, on average",
        f"modes of asynchrony on {gpus}{', without asynchrony and with theirs' if c.given else ''}{_compared_text(c)}:",
        *table(c.rows),
        *(f"  {_named(each.mode, each.most)} cannot run here: {each.reason}" for each in c.refused),
    ]
    if c.shared_engines:
        lines += ["", "other engines on shared GPUs, with mode=off:", *table(c.shared_engines)]
    if len(c.splits) > 1:
        lines += ["", f"splits, with {_explored(c)}:", *table(c.splits)]
    if c.no_split is not None:
        why = f"{c.no_split}; give more nodes (cluster.nodes), or see what --suggest finds"
        lines += ["", "splits of these GPUs into policy and engines: impossible, as none fits:", f"  {why}"]
    if c.engine_sizes:
        lines += ["", "engines, on the GPUs that the best split leaves them:", *table(c.engine_sizes)]
    lines += ["", LEGEND, *_notes(c), _advice(c), *_limits(c)]
    return "\n".join(lines)


def _given_text(c: Comparison) -> str:
    return "on shared GPUs" if c.config.cluster.shared else "as the settings split them"


def _explored(c: Comparison) -> str:
    """Returns the name of the mode in which the splits are compared."""
    return _named(c.splits[0].choice.mode, c.splits[0].choice.most)


def _compared_text(c: Comparison) -> str:
    return f", then in the split, and with the engines, that are best for {_explored(c)}" if c.splits else ""


def _named(mode: str, most: int) -> str:
    return "mode=off" if mode == "off" else f"mode={mode} and max_staleness={most}"


def _advice(c: Comparison) -> str:
    off = f"asynchrony.mode=off {_given_text(c)}"
    if c.environments_bound:
        return "no layout is advised: the environments decide how long a step takes, in every row"
    if not c.best.choice.change and c.given is None:
        return f"nothing here is faster than {off}"
    if not c.best.choice.change:
        return f"nothing here is faster than the settings: a step is {_gain(c.rows[0], c.best)} as with {off}"
    than, words = (c.rows[0], off) if c.given is None else (c.given, "the settings as they are")
    seconds = _seconds(c.best.outcome.seconds)
    return (
        f"advised: {describe(c.best.choice)}: {seconds} s, a step is {_gain(than, c.best)} as with {words}; add\n"
        f"  {as_arguments(c.best.choice.change)}"
    )


def _seconds(seconds: float) -> str:
    """Returns seconds as text, with an additional digit for short times so that differences of 1 % are visible."""
    return f"{seconds:,.{0 if seconds >= 99.95 else 1}f}"


def _gain(than: SimulatedRow, row: SimulatedRow) -> str:
    return f"{than.outcome.seconds / row.outcome.seconds:.2f} times as fast"


def dynamic_sampling_notes(config: Config) -> list[str]:
    """Returns the note that simulations leave out dynamic sampling; [] without dynamic sampling."""
    if not config.algorithm.dynamic_sampling.enabled:
        return []
    return [
        "algorithm.dynamic_sampling.enabled=true is not simulated: every simulated step draws data.prompts_per_step "
        "prompts once; the seconds of a dry run count all rounds"
    ]


def _notes(c: Comparison) -> list[str]:
    """Returns the notes on what is not simulated, and on environments that may limit the step time."""
    return [*dynamic_sampling_notes(c.config), *_environment_notes(c)]


def _environment_notes(c: Comparison) -> list[str]:
    """Returns notes if environments may limit the step time."""
    workers, slots, notes = c.config.environment.workers, c.config.environment.slots, []
    calls_s = min(row.outcome.seconds * row.outcome.calls_filled for row in c.all_rows)
    most = max_open_trajectories(changed(c.best.choice.config, (("environment.slots", None),)))
    if slots is not None and slots < most:
        notes = [
            f"environment.slots = {slots}: at most so many of up to {most:,} trajectories run at once; simulate with "
            "more slots, and with fewer, too"
        ]
    if calls_s < LIMITING * min(row.outcome.seconds for row in c.all_rows):
        return notes
    if slots is not None and slots <= workers:
        key, more = f"environment.slots = {slots}", "give more, if there is room for so many that are open"
    else:
        key, more = f"environment.workers = {workers}", "give more, if what they call can take it"
    return [
        *notes,
        f"{key}: calls of environments alone take {_seconds(calls_s)} s of a step, so many at once, of "
        f"{c.environment_s:,.1f} s a trajectory; {more}, or make them shorter",
    ]


def _limits(c: Comparison) -> list[str]:
    """Returns lines on the accuracy of the results."""
    size = c.config.data.prompts_per_step * c.config.data.samples_per_prompt
    stand = f"{c.trajectories} of them stand for {size}, and its tail is theirs"
    return [
        f"each row is {STEPS} steps or more with one seed, of the same trajectories"
        + ("" if c.trajectories == size else f" ({stand})")
        + f"; differences below {NOISE:.0%} are noise: among such rows the current settings are recommended, else "
        "the lowest staleness",
        "nothing was started (--simulate): seconds are estimates from cluster.rates; who waits for whom is what the "
        "real service and router do, in virtual time",
    ]


def _table(best: Choice | None, rows: Sequence[SimulatedRow]) -> list[str]:
    return aligned([HEAD, *(_cells(row, row.choice == best) for row in rows)], left=2)


def _gpus_text(config: Config) -> str:
    return f"{policy_ranks(config)} ranks" + (", shared" if config.cluster.shared else "")


def _cells(row: SimulatedRow, best: bool) -> tuple[str, ...]:
    choice, o = row.choice, row.outcome
    config = choice.config
    return (
        "*" if best else "",
        choice.mode,
        str(choice.most),
        _gpus_text(config),
        f"{config.rollout.engines} × TP{config.rollout.tensor}",
        f"{config.rollout.memory_fraction:g}",
        _seconds(o.seconds),
        *("–" if config.cluster.shared else f"{getattr(o, name):.0%}" for name in EXCLUSIVE_COLUMNS),
        f"{o.engines_filled:.0%}",
        f"{o.staleness:.2f}",
    )


def values(c: Comparison) -> dict[str, Any]:
    """Returns the results of a simulation as plain values for `--json`: rows of each table (`modes`, `shared`, `splits`
    and `engines`), `refused` modes, `no_split` (the reason or None), `advice` (changed settings, None without any),
    `notes`, the number of `trajectories` per step, and the `workload`."""
    return {
        "modes": [_values(row) for row in c.rows],
        "shared": [_values(row) for row in c.shared_engines],
        "splits": [_values(row) for row in c.splits],
        "engines": [_values(row) for row in c.engine_sizes],
        "no_split": c.no_split,
        "refused": [{"mode": r.mode, "max_staleness": r.most, "reason": r.reason} for r in c.refused],
        "advice": None if c.environments_bound else as_arguments(c.best.choice.change) or None,
        "notes": _notes(c),
        "trajectories": c.trajectories,
        "workload": {**c.length._asdict(), "environment_s": c.environment_s},
    }


def _values(row: SimulatedRow) -> dict[str, Any]:
    config = row.choice.config
    return {
        "mode": row.choice.mode,
        "max_staleness": row.choice.most,
        "shared": config.cluster.shared,
        "policy.ranks": policy_ranks(config),
        "rollout.engines": config.rollout.engines,
        "rollout.tensor": config.rollout.tensor,
        "rollout.memory_fraction": config.rollout.memory_fraction,
        "settings": as_arguments(row.choice.change),
        "steps": measured_steps(row.choice.most),
        **asdict(row.outcome),
        **(dict.fromkeys(EXCLUSIVE_COLUMNS) if config.cluster.shared else {}),
    }
