"""Whether a query orders its rows."""

from __future__ import annotations

import re

TOKENS = re.compile(
    r"""--[^\n]* | /\*.*?(?:\*/|\Z)
      | (?P<quoted>'[^']*(?:'|\Z) | "[^"]*(?:"|\Z) | `[^`]*(?:`|\Z) | \[[^]]*(?:\]|\Z))
      | (?P<word>[^\W\d][\w$]*)
      | (?P<sign>\S)""",
    re.DOTALL | re.VERBOSE,
)
"""SQLite's tokens, so far as they matter here: comments (no group), what stands in quotes, words, the rest."""


def orders_rows(sql: str) -> bool:
    """Whether a query has an ORDER BY of its own: one outside of all parentheses, where subqueries, windows and
    aggregates have theirs, and of texts, names and comments."""
    depth, before = 0, ""
    for token in TOKENS.finditer(sql):
        if token.lastgroup is None:  # a comment, which may stand between the two words
            continue
        if token.lastgroup == "sign":
            depth += {"(": 1, ")": -1}.get(token.group(), 0)
        word = (token["word"] or "").lower()
        if depth == 0 and (before, word) == ("order", "by"):
            return True
        before = word
    return False
