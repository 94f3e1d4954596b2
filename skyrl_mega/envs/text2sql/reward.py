"""SkyRL-SQL's published reward: −1 broken format, 0 another result, 1 the same result.

The format, over all turns: exactly one `<solution>` and one `</solution>` after it, no other tag inside, a
`<think>…</think>` somewhere, and after every observation the policy thinks first. Only what the policy wrote counts: an
observation stands in the text as an empty pair of tags, so that nothing in a database can make or break a format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_mega.envs.tags import first

SPOKEN = re.compile(r"\S")


def solution(turns: Sequence[str]) -> str | None:
    """The SQL of the policy's solution; None when the format is broken.

    Args:
        turns: What the policy wrote, a text per turn; an observation came after each but the last.
    """
    text = "<observation></observation>".join(turns)
    before, start, after = text.partition("<solution>")
    inner, end, rest = after.partition("</solution>")
    if not start or not end or "<solution>" in inner + rest or "</solution>" in rest:
        return None
    if re.search(r"</?(think|sql|observation)\b", inner, re.IGNORECASE):
        return None
    if first(text, "think") is None:
        return None
    for mark in re.finditer(r"</observation>", before, re.IGNORECASE):
        word = SPOKEN.search(before, mark.end())
        if word is None or before[word.start() : word.start() + len("<think>")].lower() != "<think>":
            return None
    return inner.strip()
