"""Normalization of LaTeX: many spellings of an answer become the same text; the meaning never changes."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNICODE = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ",
    "°": "^\\circ ", "∪": "\\cup ", "≠": "\\ne ", "±": "\\pm ", "θ": "\\theta ", "½": "\\frac{1}{2}", "∈": "\\in ",
    "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "∅": "\\emptyset ", "≈": "\\approx ",
    "√": "\\sqrt ", "²": "^2 ", "³": "^3 ", "…": "\\ldots ",
    "€": "\\euro ", "£": "\\sterling ", "ℝ": "\\reals ", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
}  # fmt: skip
SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "geq": "ge", "geqslant": "ge", "leq": "le", "leqslant": "le",
    "lt": "<", "gt": ">", "neq": "ne", "textbf": "text", "textit": "text", "textrm": "text", "textnormal": "text",
    "mathrm": "text", "mathbf": "text", "mathit": "text", "mbox": "text", "hbox": "text", "operatorname": "text",
    "lbrace": "{", "rbrace": "}", "degree": "^\\circ", "varnothing": "emptyset", "infin": "infty", "times": "cdot",
    "lvert": "|", "rvert": "|", "boldsymbol": "text", "bm": "text", "dbinom": "binom", "tbinom": "binom",
    "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "simeq": "approx", "pounds": "sterling", "langle": "(",
    "rangle": ")", "bar": "overline",
}  # fmt: skip
"""Command → canonical spelling."""

DROPPED = ("left", "right", "displaystyle", "textstyle", "limits", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "rm")
ONE_LETTER_UNITS = ("m", "g", "s", "h", "l", "L", "V", "W", "N", "J", "K")
"""Letters meaning a unit in `\\text{ m}` after a number; elsewhere these letters are variables."""
SPACES = ("quad", "qquad", "thinspace", "enspace", "hspace", "phantom")
GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ |\\!|~)(?=\d{3}(?!\d))")
"""Unambiguous separator between digit groups of a long number."""

BEFORE = re.compile(
    r"(?i)^(?:(?:so|thus|therefore),? )?(?:the )?(?:final )?answer(?: is|\s*:)\s*:?\s*|^(?:=|\\(?:approx|sim)\b)\s*"
)
"""Text without meaning in front of an answer."""
MATRIX = r"\\begin{pmatrix}\1\\end{pmatrix}"


def tidy(answer: str) -> str:
    """Returns the canonical spelling of an answer: one name per command, braces around every argument, no layout.
    `$\\dfrac12$` becomes `\\frac{1}{2}`."""
    text = answer.strip()
    for sign, command in UNICODE.items():
        text = text.replace(sign, command)
    text = (
        text.replace("\\\\", "\\cr ")
        .replace("{bmatrix}", "{pmatrix}")
        .replace("\\$", "\\dollar ")
        .replace("$", " ")
        .replace("\\(", " ")
        .replace("\\)", " ")
    )
    if text.startswith("**") or text.endswith("**"):
        text = text.replace("**", " ").strip()
    if wrapped(text, "\\boxed{", "}"):
        text = text[len("\\boxed{") : -1]
    text = text.replace("...", "\\ldots ")
    text = GROUPED.sub("", text)
    text = re.sub(r"\\[,;:!> \n]|\\\[|\\\]|~", " ", text).replace("\\%", "%")
    text = re.sub(r"\\([a-zA-Z]+)\*?", _command, text)
    text = _unwrapped(text)
    text = re.sub(r"\\frac\s*(?!\{)(\d|[a-zA-Z]|\\pi)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d|[a-zA-Z]|\\pi)", r"\1{\2}", text)
    text = re.sub(r"(\\frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\d|[a-zA-Z]|\\pi)", r"\1{\2}", text)
    text = re.sub(r"\\binom\s*(\w)\s*(\w)", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\{([^{}]*?)\s*\\(over|choose)\b([^{}]*)\}", _infix, text)
    text = re.sub(r"\\sqrt\s*(\d|[a-zA-Z]|\\pi)", r"\\sqrt{\1}", text)
    text = re.sub(r"\(\s*\\begin\s*\{(?:small)?matrix\}(.*)\\end\s*\{(?:small)?matrix\}\s*\)", MATRIX, text)
    text = re.sub(r"\\\{\s*\\\}", r"\\emptyset ", re.sub(r"\\mathbb\s*\{?\s*R\s*\}?", r"\\reals ", text))
    text = text.replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ").replace("**", "^")
    text = " ".join(text.split()).rstrip(".,; ")
    while (inner := BEFORE.sub("", text)) != text:
        text = inner
    return text


def _command(match: re.Match[str]) -> str:
    name = match.group(1)
    if name in DROPPED:
        return " "
    if name in SPACES:
        return " "
    written = SAME.get(name, name)
    if written in ("{", "}"):
        return f"\\{written} "
    return (
        f"\\{written}" + ("" if match.string[match.end() : match.end() + 1] in ("{", "[") else " ")
        if (written.isalpha())
        else f"{written} "
    )


def _infix(match: re.Match[str]) -> str:
    """Rewrites `{1 \\over 2}` and `{5 \\choose 2}` as prefix commands."""
    name = "frac" if match.group(2) == "over" else "binom"
    return f"\\{name}{{{match.group(1).strip()}}}{{{match.group(3).strip()}}}"


def _unwrapped(text: str) -> str:
    """Unwraps `\\text{A}` and `\\mathbf{12}` to A and 12: without a word inside, the content is no text. A lone "or" or
    "and" becomes a separator.
    """

    def plain(match: re.Match[str]) -> str:
        inner = match.group(1)
        if inner.strip() in ("or", "and"):
            return f" {inner.strip()} "
        if inner.strip() in ONE_LETTER_UNITS and re.search(r"[\d})]\s*$", match.string[: match.start()]):
            return match.group(0)
        return match.group(0) if re.search(r"[A-Za-z]{2}", inner) else f" {inner} "

    return re.sub(r"\\text\s*\{([^{}]*)\}", plain, text)


def split_top_level(text: str, separators: Iterable[str]) -> tuple[list[str], list[str]]:
    """Splits a text at separators outside all brackets; returns the stripped pieces, perhaps empty, and the separators
    between them. The longest separator at a position wins.
    """
    pieces, matched, depth, at, start = [], [], 0, 0, 0
    by_length = sorted(separators, key=len, reverse=True)
    while at < len(text):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        separator = next((s for s in by_length if text.startswith(s, at)), None) if depth == 0 else None
        if (
            separator is not None
            and separator[0] == "\\"
            and text[at + len(separator) : at + len(separator) + 1].isalpha()
        ):
            separator = None  # prefix of a longer command
        if separator is None:
            at += 1
            continue
        pieces.append(text[start:at].strip())
        matched.append(separator)
        start = at = at + len(separator)
    return [*pieces, text[start:].strip()], matched


def wrapped(text: str, opening: str, closing: str) -> bool:
    """Returns True if a single pair of brackets, `opening` and its match `closing`, encloses the whole text, and the
    text between them is not empty."""
    if not (text.startswith(opening) and text.endswith(closing)) or len(text) <= len(opening) + len(closing):
        return False
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and at >= len(opening) - 1:
            return at == len(text) - 1
    return False
