"""Lines of `--suggest` that compare row 1 with row 0: error bars, each change alone, and seconds by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from skyrl_mega.cli.dry_run_text import counted
from skyrl_mega.cli.dry_run_time_text import PHASES, duration, seconds_text
from skyrl_mega.cli.suggest_changes import ChoiceComparison, SingleChange
from skyrl_mega.cli.suggest_rows import Row, Rows
from skyrl_mega.common.tables import aligned
from skyrl_mega.planner.candidates import as_arguments
from skyrl_mega.planner.memory import GIB
from skyrl_mega.planner.run_time import USUAL_STEPS, ErrorBar
from skyrl_mega.planner.search import TIE


def error_lines(rows: Rows, comparison: ChoiceComparison) -> list[str]:
    """Returns the lines about the error bar of row 1 and of what it saves, with their three largest causes; [] without
    choices."""
    lines = []
    if rows.bar is not None:
        lines += [
            f"error bar of row 1: ×{rows.bar.low:.2f} to ×{rows.bar.high:.2f} of its seconds, mostly from",
            f"  {_largest_causes(rows.bar)}",
        ]
    if comparison.ratio is not None and (ends := saved_between(rows, comparison.ratio)):
        lines += [
            f"row 1 saves {ends[0]:.0%} to {ends[1]:.0%} of row 0's seconds, as most causes move both rows; left are",
            f"  {_largest_causes(comparison.ratio)}",
        ]
    return lines


def _largest_causes(bar: ErrorBar) -> str:
    causes = sorted(bar.causes, key=lambda cause: cause.low / cause.high)[:3]
    return ", ".join(cause.name.removeprefix("cluster.") for cause in causes)


def saved_between(rows: Rows, ratio: ErrorBar | None) -> tuple[float, float] | None:
    """Returns the lowest and the highest share of row 0's seconds that row 1 may save, negative where row 1 is slower;
    None without row 0 or `ratio`, the error bar of row 1's seconds divided by row 0's."""
    if rows.given is None or ratio is None:
        return None
    estimate = rows.choices[0].seconds / rows.given.seconds
    return 1 - estimate * ratio.high, 1 - estimate * ratio.low


def change_lines(rows: Rows, changes: Sequence[SingleChange]) -> list[str]:
    """Returns a table of the changes from row 0 to row 1, each made alone, with gain and costs; then changes that are
    alone more than `TIE` faster than row 1, and the errors of changes that cannot run alone. [] without changes."""
    cells, errors, faster = [], [], []
    for each in changes:
        name = as_arguments(each.change)
        if each.row is None:
            errors.append(f"  {name} cannot run alone: {each.error}")
        else:
            saved = round(each.row.saved(rows.given) or 0.0, 2) + 0.0  # no negative zero
            if each.row.seconds * (1 + TIE) < rows.choices[0].seconds:
                faster.append(
                    f"  {name} alone is faster than row 1; the search did not try it with row 0's other settings"
                )
            cells.append((name, f"{each.row.seconds:,.1f}", f"{saved:.0%}", room(each.row), host(each.row)))
    table = aligned([("", "s a step", "saves", "room", "host"), *cells]) if cells else []
    return ["from 0 to 1, each change alone:", *table, *faster, *errors] if changes else []


def phase_lines(rows: Rows, comparison: ChoiceComparison) -> list[str]:
    """Returns a table of the seconds of a step by phase, with duration and GPU-hours of all steps, or of `USUAL_STEPS`
    if their number is unknown; [] without phases."""
    phases = comparison.phases
    if not phases:
        return []
    steps = USUAL_STEPS if comparison.steps is None else comparison.steps
    all_steps, assumed = counted(steps, "step"), " (assumed)" if comparison.steps is None else ""
    numbered = {str(number): row for number, row in enumerate((rows.given, *rows.choices)) if row}
    times = {number: asdict(time) for number, time in phases.items()}
    names = [name for name in PHASES if any(time[name] for time in times.values())]
    cells = [
        (
            number,
            *(seconds_text(time[name]) for name in names),
            duration(phases[number].step * steps),
            f"{numbered[number].gpu_hours * steps:,.0f}",
        )
        for number, time in times.items()
    ]
    return [
        f"seconds by phase, and {all_steps}{assumed} without evaluations and checkpoints:",
        *aligned([("", *names, all_steps, "GPU-hours"), *cells]),
    ]


def room(row: Row) -> str:
    """Returns the GiB left on the fullest GPU, after the warning if any."""
    return f"{row.warning} {row.free / GIB:.1f}".strip()


def host(row: Row) -> str:
    """Returns the GiB used of the host memory of the fullest node."""
    return f"{row.host / GIB:,.0f}"
