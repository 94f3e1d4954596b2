"""Detection of a query's own ORDER BY."""

from __future__ import annotations

import re

TOKENS = re.compile(
    r"""--[^\n]* | /\*.*?(?:\*/|\Z)
      | (?P<quoted>'[^']*(?:'|\Z) | "[^"]*(?:"|\Z) | `[^`]*(?:`|\Z) | \[[^]]*(?:\]|\Z))
      | (?P<word>[^\W\d][\w$]*)
      | (?P<sign>\S)""",
    re.DOTALL | re.VERBOSE,
)
"""SQLite's tokens, as far as needed here: comments (no group), quoted text, words, the rest."""


def orders_rows(sql: str) -> bool:
    """Returns True if a query orders its rows: it has an ORDER BY outside all parentheses.

    Inside parentheses, an ORDER BY belongs to a subquery, a window or an aggregate. Texts, names and comments are
    skipped.
    """
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
