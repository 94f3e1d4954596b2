"""Published results for comparison with ours. All are shares of 1 except DAPO's average score, a reward.

Sources: the result tables of SkyRL's documentation (SearchR1, DAPO, SkyRL-SQL, SkyRL-Agent, GSM8K), of Search-R1
(arXiv:2503.09516) and of DAPO (arXiv:2503.14476). Sizes refer to the full test sets of the publication.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

IN, OUT = "†", "*"
"""Marks of in-domain and out-of-domain sets."""


@dataclass(frozen=True)
class Row:
    """A test set in a published table."""

    title: str
    names: tuple[str, ...]
    """Possible names of our corresponding set, in the form returned by `normalized`."""
    size: int
    """Examples of the full set."""


@dataclass(frozen=True)
class Column:
    """A model in a published table."""

    title: str
    values: tuple[float | None, ...]
    """Scores by row."""
    average: float | None = None
    """The published average."""


@dataclass(frozen=True)
class Table:
    """A published table of a score."""

    title: str
    score: str
    """Our corresponding score: `accuracy`, `pass` or `reward`."""
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    note: str = ""


SEVEN = (
    Row(f"NQ{IN}", ("nq", "naturalquestions"), 3610),
    Row(f"TriviaQA{IN}", ("triviaqa", "tq"), 11313),
    Row(f"PopQA{IN}", ("popqa",), 14267),
    Row(f"HotpotQA{OUT}", ("hotpotqa",), 7405),
    Row(f"2wiki{OUT}", ("2wiki", "2wikimultihopqa"), 12576),
    Row(f"Musique{OUT}", ("musique",), 2417),
    Row(f"Bamboogle{OUT}", ("bamboogle",), 125),
)
AIME24 = (Row("AIME24", ("aime24", "aime2024"), 30),)
SPIDER = (
    Row("Spider dev", ("spider", "spiderdev"), 1034),
    Row("Spider test", ("spidertest",), 2147),
    Row("Spider-Realistic", ("spiderrealistic", "realistic"), 508),
    Row("Spider-DK", ("spiderdk", "dk"), 535),
    Row("Spider-Syn", ("spidersyn", "syn"), 1034),
)

PUBLISHED: dict[str, tuple[Table, ...]] = {
    "searchr1": (
        Table(
            "SearchR1, exact match",
            "accuracy",
            SEVEN,
            (
                Column("Search-R1, 3 turns", (0.397, 0.565, 0.391, 0.331, 0.310, 0.124, 0.232), 0.336),
                Column("Qwen2.5-3B-Instruct, 2 turns", (0.455, 0.613, 0.447, 0.334, 0.313, 0.086, 0.242), 0.356),
                Column("3 turns", (0.449, 0.616, 0.444, 0.417, 0.396, 0.179, 0.448), 0.421),
                Column("4 turns", (0.449, 0.611, 0.435, 0.407, 0.403, 0.163, 0.352), 0.403),
                Column("Qwen3-30B-A3B, 4 turns", (0.463, 0.664, 0.448, 0.412, 0.361, 0.178, 0.488), 0.457),
            ),
            f"{IN} in-domain, {OUT} out-of-domain. The averages published are means over sets, but for 0.457, which is "
            "the mean over examples.",
        ),
    ),
    "dapo": (
        Table(
            "DAPO, AIME24, pass@32",
            "pass",
            AIME24,
            (
                Column("Qwen2.5-Math-7B, step 320", (0.633,)),
                Column("Qwen3-1.7B, step 225", (0.4,)),
                Column("Qwen3-4B, step 90", (0.6,)),
                Column("Qwen3-30B-A3B, step 120", (0.733,)),
            ),
        ),
        Table(
            "DAPO, AIME24, average score (reward ±1)",
            "reward",
            AIME24,
            (
                Column("Qwen2.5-Math-7B, step 320", (-0.304,)),
                Column("Qwen3-1.7B, step 225", (-0.702,)),
                Column("Qwen3-4B, step 90", (-0.51,)),
            ),
        ),
        Table(
            "DAPO, AIME24, accuracy mean@32",
            "accuracy",
            AIME24,
            (
                Column("Qwen3-30B-A3B, step 120", (0.4375,)),
                Column("Qwen2.5-32B, DAPO's paper", (0.50,)),
                Column("DeepSeek-R1-Zero-Qwen-32B", (0.47,)),
            ),
        ),
    ),
    "sql": (
        Table(
            "SkyRL-SQL, execution accuracy",
            "accuracy",
            SPIDER,
            (
                Column("Qwen2.5-Coder-7B, trained on 1 turn, 5 turns", (0.795, 0.822, 0.776, 0.656, 0.684), 0.747),
                Column("trained on several turns", (0.839, 0.852, 0.811, 0.720, 0.737), 0.792),
                Column("trained on 1 turn, evaluated on 1", (0.812, 0.838, 0.768, 0.679, 0.701), 0.760),
                Column("trained on several, evaluated on 1", (0.824, 0.837, 0.803, 0.705, 0.712), 0.776),
                Column("Qwen2.5-Coder-7B-Instruct, untrained", (0.771, 0.796, 0.742, 0.628, 0.662), 0.720),
                Column("GPT-4o", (0.813, 0.824, 0.801, 0.721, 0.719), 0.776),
                Column("o4-mini", (0.806, 0.818, 0.812, 0.708, 0.721), 0.773),
            ),
            "5 turns where nothing else is said. The training ran on one node of 8 H100s.",
        ),
    ),
    "swe": (
        Table(
            "SkyRL-Agent, resolved",
            "accuracy",
            (Row("SWE-Bench-Verified", ("swebenchverified",), 500),),
            (
                Column("7B before", (0.11,)),
                Column("after", (0.146,)),
                Column("8B before", (0.036,)),
                Column("after", (0.094,)),
                Column("14B before", (0.18,)),
                Column("after", (0.216,)),
            ),
            "7B: from OpenHands-7B-Agent, 16 h on 8 H100s. 8B: from Qwen3-8B without thinking, 27 h on 8 H200s. 14B: "
            "from Qwen3-14B with thinking, 20 h on 8 H200s.",
        ),
    ),
    "gsm8k": (
        Table(
            "GSM8K, exact match",
            "accuracy",
            (Row("GSM8K", ("gsm8k", "openaigsm8k"), 1319),),
            (Column("Qwen2.5-1.5B-Instruct, GRPO, step 140", (0.796,)),),
        ),
    ),
}
"""Tables by the name given to `--published`."""


def normalized(name: str) -> str:
    """Normalizes a set's name: lower case letters and digits, without the prefix `searchR1_` of SkyRL's users."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("searchr1")


def matching_tables(names: Sequence[str]) -> list[str]:
    """Returns the keys in PUBLISHED of the published results with a row for any of these sets.

    Args:
        names: Names of our sets.
    """
    ours = {normalized(name) for name in names}
    return [
        key for key, tables in PUBLISHED.items() if any(ours & set(row.names) for table in tables for row in table.rows)
    ]
