"""The tables, and the published figures compared with the source document."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.evaluate.published import PUBLISHED, matching_tables, normalized
from skyrl_mega.evaluate.report import EXAMPLES, SETS, comparison_table, report, values
from skyrl_mega.evaluate.scores import Score, SetScores

SEARCHR1 = PUBLISHED["searchr1"][0]


def of(name: str, prompts: int, accuracy: float, **more: float) -> SetScores:
    scores = {"reward": accuracy, "accuracy": accuracy, "pass": accuracy, **more}
    return SetScores(name, prompts, 2, {m: Score(v, 0.01) for m, v in scores.items()}, 0.25, 0.0, 33.3, left_out=0)


def cells(text: str) -> dict[str, list[str]]:
    """Returns the lines of Markdown tables by first cell."""
    by_name = {}
    for line in text.splitlines():
        if line.startswith("| "):
            first, *rest = (cell.strip() for cell in line.strip("| ").split("|"))
            by_name.setdefault(first, rest)
    return by_name


def test_published_figures_are_those_of_the_recipes(real_data: Path) -> None:
    text = (real_data / "RECIPES.md").read_text()
    for i, row in enumerate(SEARCHR1.rows):
        line = next(line for line in text.splitlines() if line.startswith(f"| {row.title} |"))
        figures = [float(f) for f in re.findall(r"0\.\d+", line)]
        assert figures == [column.values[i] for column in SEARCHR1.columns], row.title
    line = next(line for line in text.splitlines() if line.startswith("| Average |"))
    assert [float(f) for f in re.findall(r"0\.\d+", line)] == [column.average for column in SEARCHR1.columns]

    dapo = text[text.index("DAPO (AIME24") : text.index("SkyRL-SQL,")].replace("−", "-")
    for table in PUBLISHED["dapo"]:
        for column in table.columns:
            [value] = column.values
            forms = {f"{value}", f"{value:.3f}", f"{100 * (value or 0):.0f}"}
            assert any(re.search(rf"(?<![\d.]){re.escape(form)}(?![\d])", dapo) for form in forms), column.title
    sql = text[text.index("SkyRL-SQL,") : text.index("SkyRL-Agent")]
    first, second, *_ = PUBLISHED["sql"][0].columns
    for column in (first, second):
        assert " ".join(f"{100 * v:.1f}" for v in column.values if v is not None) in " ".join(sql.split())
    for average in ("79.2", "77.6", "77.3"):
        assert average in sql
    assert "11 → 14.6 %, 8B 3.6 → 9.4 %, 14B 18 → 21.6 %" in text
    assert [c.average for c in PUBLISHED["sql"][0].columns] == [0.747, 0.792, 0.760, 0.776, 0.720, 0.776, 0.773]
    assert [c.values[0] for c in PUBLISHED["swe"][0].columns] == [0.11, 0.146, 0.036, 0.094, 0.18, 0.216]
    assert "0.796 at step 140" in text and PUBLISHED["gsm8k"][0].columns[0].values == (0.796,)


def test_published_averages_are_the_means_that_the_table_says() -> None:
    """Compares averages: the 3B models' are means over sets; the 30B model's is the mean over examples, and confirms
    the set sizes."""
    rows = cells(comparison_table(SEARCHR1, []))
    over_sets, over_examples = rows[SETS], rows[EXAMPLES]
    assert over_sets[1:5] == ["0.336", "0.356", "0.421", "0.403"] == rows["average, as published"][1:5]
    assert (over_sets[5], over_examples[5], rows["average, as published"][5]) == ("0.431", "0.457", "0.457")
    sql = cells(comparison_table(PUBLISHED["sql"][0], []))
    assert sql[SETS][2] == sql["average, as published"][2] == "0.792"
    averages = sql["average, as published"][1:]
    for mean, average in zip(sql[SETS][1:], averages, strict=True):
        assert abs(float(mean) - float(average)) < 0.0011, "each is the mean of its five, rounded"


def test_rows_stand_in_their_order_and_absent_sets_are_dashes() -> None:
    sets = [of("searchR1_hotpotqa", 40, 0.4), of("other", 5, 0.9), of("NQ", 10, 0.1)]
    text = comparison_table(SEARCHR1, sets)
    rows = cells(text)
    assert list(rows)[1:8] == ["NQ†", "TriviaQA†", "PopQA†", "HotpotQA*", "2wiki*", "Musique*", "Bamboogle*"]
    assert rows["NQ†"][:2] == ["0.100 ± 0.010", "0.397"]
    assert rows["HotpotQA*"][0] == "0.400 ± 0.010"
    assert [rows[r.title][0] for r in SEARCHR1.rows[1:3]] == ["–", "–"]
    # The means of all columns cover the same two rows.
    assert rows[f"{SETS} (the 2 run)"][0].startswith("0.250 ±")
    assert rows[f"{SETS} (the 2 run)"][1] == f"{(0.397 + 0.331) / 2:.3f}"
    assert rows[f"{EXAMPLES} (the 2 run)"][0].startswith("0.340 ±")
    assert rows[f"{EXAMPLES} (the 2 run)"][1] == f"{(0.397 * 3610 + 0.331 * 7405) / (3610 + 7405):.3f}"


def test_all_tables_line_up_and_name_both_means() -> None:
    sets = [of("searchR1_tq", 40, 0.4, f1=0.5), of("openai/gsm8k", 10, 0.1)]
    names = matching_tables([s.name for s in sets])
    assert names == ["searchr1", "gsm8k"]
    text = report(sets, names, "a model")
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 3
    for block in blocks:
        assert len({len(line) for line in block.splitlines()}) == 1, block
        assert SETS in block and EXAMPLES in block
    own_table = cells(blocks[0])
    assert own_table["set"] == [
        "examples",
        "reward mean@2",
        "accuracy mean@2",
        "pass@2",
        "f1@2",
        "truncated",
        "failed",
        "tokens",
    ]
    assert own_table["openai/gsm8k"] == ["10", *["0.100 ± 0.010"] * 3, "–", "0.250", "0.000", "33.3"]
    assert own_table[EXAMPLES][1].startswith("0.340")
    figures = values(sets, names)
    assert figures[SETS]["accuracy"]["value"] == pytest.approx(0.25)
    assert figures["published"]["searchr1"][0]["rows"]["TriviaQA†"]["this run"]["value"] == 0.4


@pytest.mark.parametrize(
    "name, key",
    [
        ("searchR1_nq", "searchr1"),
        ("tq", "searchr1"),
        ("2WikiMultihopQA", "searchr1"),
        ("Bamboogle", "searchr1"),
        ("AIME-2024", "dapo"),
        ("spider_dev", "sql"),
        ("SWE-Bench-Verified", "swe"),
        ("openai/gsm8k", "gsm8k"),
        ("facts", None),
    ],
)
def test_sets_find_their_published_table(name: str, key: str | None) -> None:
    assert matching_tables([name]) == ([key] if key else [])


def test_names_of_rows_are_plain_and_none_is_there_twice() -> None:
    names = [name for tables in PUBLISHED.values() for row in tables[0].rows for name in row.names]
    assert all(normalized(name) == name for name in names)
    assert len(names) == len(set(names))
    for tables in PUBLISHED.values():
        for table in tables:
            assert all(len(column.values) == len(table.rows) for column in table.columns)


def test_what_failed_is_counted_and_a_set_without_scores_leaves_no_mean() -> None:
    some, none = of("NQ", 10, 0.4), of("tq", 4, 0.0)
    some, none = replace(some, failed=0.15, unjudged=1), replace(none, scores={}, failed=1.0, unjudged=4)
    text = report([some, none], ["searchr1"], "a model")
    assert (
        "NQ: the environments of 3 of 20 samples failed; these samples have no score (1 example has no other samples)"
        in text
    )
    assert (
        "tq: the environments of all 8 samples failed: it has no scores, and there is no mean over sets or examples."
        in text
    )
    alone = report([none], [], "a model")
    assert "failed: it has no scores." in alone and "no mean" not in alone
    assert cells(text)[SETS][1:4] == cells(text)[EXAMPLES][1:4] == ["–"] * 3
    assert cells(comparison_table(SEARCHR1, [some, none]))["TriviaQA†"][0] == "–"
    assert values([some, none], ["searchr1"])[SETS]["accuracy"] is None


def test_one_set_has_no_means_over_sets() -> None:
    one, two = (report([of(name, 3, 0.5) for name in names], [], "a model") for names in (["a"], ["a", "b"]))
    assert SETS not in one and EXAMPLES not in one and "| a" in one
    assert SETS in two and EXAMPLES in two
