"""Result tables: aligned Markdown for people, and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from skyrl_mega.evaluate.published import PUBLISHED, ModelColumn, PublishedTable, TestSetRow, normalized
from skyrl_mega.evaluate.scores import Score, SetScores, mean_over_examples, mean_over_sets

ABSENT = "–"
"""Cell of a table without a value."""
SETS, EXAMPLES, AVERAGE = "mean over sets", "mean over examples", "average, as published"
"""Titles of the rows with means."""


def report(sets: Sequence[SetScores], published: Sequence[str], about: str) -> str:
    """Returns all tables as Markdown. Raises KeyError for a key that is not in `PUBLISHED`.

    Args:
        sets: The sets, in row order.
        published: Keys of `PUBLISHED`, whose tables are appended.
        about: A line about the evaluated model and settings, placed first.
    """
    parts = [about, score_table(sets)]
    for name in published:
        parts += [f"## {table.title}\n\n{comparison_table(table, sets)}" for table in PUBLISHED[name]]
    return "\n\n".join(parts) + "\n"


def score_table(sets: Sequence[SetScores]) -> str:
    """Returns the scores as a Markdown table, and notes: a row for each set and, for several sets, the two means.

    Args:
        sets: At least one set, else ValueError.
    """
    further = sorted({name for s in sets for name in s.scores} - {"reward", "accuracy", "pass"})
    names = ["reward", "accuracy", "pass", *further]
    n = max(s.samples for s in sets)
    titles = [f"{'reward mean' if m == 'reward' else 'accuracy mean' if m == 'accuracy' else m}@{n}" for m in names]
    rows = [
        [
            s.name,
            str(s.prompts),
            *(_score(s.scores.get(m)) for m in names),
            f"{s.truncated:.3f}",
            f"{s.failed:.3f}",
            f"{s.tokens:.1f}",
        ]
        for s in sets
    ]
    total = sum(s.prompts for s in sets)
    means = ((SETS, mean_over_sets), (EXAMPLES, mean_over_examples)) if len(sets) > 1 else ()
    for title, mean in means:
        rows.append([title, str(total), *(_score(mean(sets, m)) for m in names), "", "", ""])
    lines = [grid(["set", "examples", *titles, "truncated", "failed", "tokens"], rows)]
    both = f"{SETS}: every set counts the same. {EXAMPLES}: every example counts the same. " if means else ""
    lines += [
        f"{both}±: standard error over examples. pass@{n}: an example with at least one right sample of {n}. tokens: "
        "that the policy wrote, mean of a sample."
    ]
    lines += [_failed(s, bool(means)) for s in sets if s.failed]
    for s in sets:
        if s.left_out:
            what = "1 prompt longer" if s.left_out == 1 else f"{s.left_out} prompts longer"
            lines.append(f"{s.name}: left out {what} than rollout.max_prompt_tokens.")
    return "\n\n".join(lines)


def _failed(s: SetScores, means: bool) -> str:
    """Returns a note about a set's samples without a score. `means`: the table contains means over sets."""
    every = s.prompts * s.samples
    count = round(s.failed * every)
    if count == every:
        so = ", and there is no mean over sets or examples" if means else ""
        return f"{s.name}: the environments of all {every} samples failed: it has no scores{so}."
    have = "example has" if s.unjudged == 1 else "examples have"
    left = f" ({s.unjudged} {have} no other samples)" if s.unjudged else ""
    return f"{s.name}: the environments of {count} of {every} samples failed; these samples have no score{left}."


def comparison_table(table: PublishedTable, sets: Sequence[SetScores]) -> str:
    """Returns a published table as Markdown, with our results as the first column and dashes for sets not run.

    To be comparable, the means in every column cover the rows run, or all rows if none was run. Published means over
    examples weigh by the full sets' sizes, ours by the examples run.
    """
    run = _sets_by_row(table, sets)
    counted = [i for i, row in enumerate(table.rows) if row in run] or list(range(len(table.rows)))
    n = max((s.samples for s in run.values()), default=1)
    rows = []
    for i, row in enumerate(table.rows):
        ours = _score(run[row].scores.get(table.score)) if row in run else ABSENT
        rows.append([row.title, ours, *(_figure(c.values[i]) for c in table.columns)])
    some = f" (the {len(run)} run)" if 0 < len(run) < len(table.rows) else ""
    mine = list(run.values())
    sizes = [table.rows[i].size for i in counted]
    for title, mean, weights in ((SETS, mean_over_sets, [1] * len(counted)), (EXAMPLES, mean_over_examples, sizes)):
        theirs = (_figure(_weighted(c, counted, weights)) for c in table.columns)
        rows.append([title + some, _score(mean(mine, table.score)), *theirs])
    if any(c.average is not None for c in table.columns):
        rows.append([AVERAGE, ABSENT, *(_figure(c.average) for c in table.columns)])
    what = {"reward": "reward mean", "accuracy": "accuracy mean", "pass": "pass"}[table.score]
    text = grid(["set", f"this run, {what}@{n}", *(c.title for c in table.columns)], rows)
    return f"{text}\n\n{table.note}" if table.note else text


def values(sets: Sequence[SetScores], published: Sequence[str]) -> dict[str, Any]:
    """Returns the results as JSON values: scores of each set, the two means, and published tables; null for a missing
    score or mean. Raises KeyError for a key that is not in `PUBLISHED`.

    Args:
        sets: The sets, in row order.
        published: Keys of `PUBLISHED`, whose tables are included.
    """
    metrics = list(dict.fromkeys(m for s in sets for m in s.scores))
    return {
        "sets": [asdict(s) for s in sets],
        SETS: {m: _values(mean_over_sets(sets, m)) for m in metrics},
        EXAMPLES: {m: _values(mean_over_examples(sets, m)) for m in metrics},
        "published": {name: [_published(table, sets) for table in PUBLISHED[name]] for name in published},
    }


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns: the first to the left, all others to the right. Each row has as
    many cells as `head` (not checked); a `|` in a cell is not escaped."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def _sets_by_row(table: PublishedTable, sets: Sequence[SetScores]) -> dict[TestSetRow, SetScores]:
    return {row: s for row in table.rows for s in sets if normalized(s.name) in row.names}


def _published(table: PublishedTable, sets: Sequence[SetScores]) -> dict[str, Any]:
    run = _sets_by_row(table, sets)
    every = list(range(len(table.rows)))
    return {
        "title": table.title,
        "score": table.score,
        "rows": {
            row.title: {
                "this run": _values(run[row].scores.get(table.score)) if row in run else None,
                **{f"{j}: {c.title}": c.values[i] for j, c in enumerate(table.columns, start=1)},
            }
            for i, row in enumerate(table.rows)
        },
        "means over all rows": {
            f"{j}: {c.title}": {
                SETS: _weighted(c, every, [1] * len(every)),
                EXAMPLES: _weighted(c, every, [row.size for row in table.rows]),
                AVERAGE: c.average,
            }
            for j, c in enumerate(table.columns, start=1)
        },
    }


def _weighted(column: ModelColumn, rows: Sequence[int], weights: Sequence[int]) -> float | None:
    """Returns the weighted mean of a column's rows; None if a value was not published."""
    given = [column.values[i] for i in rows]
    if any(value is None for value in given):
        return None
    return sum(w * (v or 0.0) for w, v in zip(weights, given, strict=True)) / sum(weights)


def _figure(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"


def _score(score: Score | None) -> str:
    if score is None:
        return ABSENT
    return f"{score.value:.3f}" if score.error is None else f"{score.value:.3f} ± {score.error:.3f}"


def _values(score: Score | None) -> Mapping[str, Any] | None:
    return None if score is None else asdict(score)
