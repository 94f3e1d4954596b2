"""Text comparison of answers by Minerva's published rules (arXiv:2206.14858, appendix D), used by DAPO's grader.

Values and algebra are ignored: `34.` and `34.0` are not 34, but `3 4` is, because spaces are dropped.
"""

from __future__ import annotations

import re

DROPPED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Texts removed at every position, in this order."""

RULES: tuple[tuple[str, str], ...] = (
    *((re.escape(article), "") for article in ("an ", "a ")),
    (r"\.\$", "$"),
    (r"\\\$", ""),
    (r"\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\\text\{and\}", ","),
    (r"\\text\{and\}", ","),
    (r"\\text\{m\}", r"\\text{}"),
    *((re.escape(word), "") for word in DROPPED),
    (r".*?\$(.*?)\$.*", r"$\1$"),
    *((rf"\\{name}\{{(.*?)\}}", r"\1") for name in ("text", "textbf", "overline")),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)
"""Patterns and replacements, applied in order."""


def same(gold: str, answer: str) -> bool:
    """Returns True if the right answer `gold` and the answer have the same normal form (`normal`)."""
    return normal(gold) == normal(answer)


def normal(answer: str) -> str:
    """Returns an answer's normal form by `RULES`, for comparison with another normal form.

    Takes the text after the last `=`, and of this text only the part between the first two dollar signs, if any.
    Removes articles, units, spaces, and the commands `\\text`, `\\textbf`, `\\overline` and `\\boxed` around their
    content; completes the braces of `frac` and `sqrt`. Removes commas if all other characters are digits: `1,000`
    becomes `1000`, and `-1,000` stays.
    """
    text = answer.rpartition("=")[2]
    for pattern, put in RULES:
        text = re.sub(pattern, put, text)
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()
