"""SkyRL-SQL's published reward: −1 for a broken format, 0 for another result, 1 for the same result.

The format, over all turns: exactly one `<solution>` and one `</solution>` after it, no other tag inside, a
`<think>…</think>` somewhere, and a thought first after every observation. Only the policy's own text counts: an
observation appears as an empty pair of tags, so no database content can make or break the format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyrl_mega.envs.tags import first_tag

NON_SPACE = re.compile(r"\S")


def solution(turns: Sequence[str]) -> str | None:
    """Returns the SQL of the policy's solution; None for a broken format.

    The format: exactly one `<solution>…</solution>`, without tags of think, sql or observation inside; at least one
    closed `<think>…</think>`; and `<think>` as the first text after each observation before the solution.

    Args:
        turns: Texts of the policy, one per turn; an observation came after each but the last.
    """
    text = "<observation></observation>".join(turns)
    before, start, after = text.partition("<solution>")
    inner, end, rest = after.partition("</solution>")
    if not start or not end or "<solution>" in inner + rest or "</solution>" in rest:
        return None
    if re.search(r"</?(think|sql|observation)\b", inner, re.IGNORECASE):
        return None
    if first_tag(text, "think") is None:
        return None
    for mark in re.finditer(r"</observation>", before, re.IGNORECASE):
        word = NON_SPACE.search(before, mark.end())
        if word is None or before[word.start() : word.start() + len("<think>")].lower() != "<think>":
            return None
    return inner.strip()
