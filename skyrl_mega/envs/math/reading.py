"""Parser of answers: a number, an expression, words, or a compound of parts.

Only answers of the same kind are compared, so letters, lists, pairs, equations, ratios and percentages are kept apart.
Words are removed only inside `\\text{}` or after a number; an equation stays whole unless the left side is a single
symbol. Unrecognized text is `opaque` and equals only the same text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from .latex import split_top_level, tidy, wrapped
from .units import MAGNITUDES, unit_of

RELATIONS = {"<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!="}
FLIPPED = {">": "<", ">=": "<="}
FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log",
             "ln", "exp")  # fmt: skip
COMMANDS = {*FUNCTIONS, "frac", "sqrt", "cdot", "pi", "infty", "binom", "alpha", "beta", "gamma", "delta", "epsilon",
            "theta", "lambda", "mu", "phi", "varphi", "omega", "rho", "sigma", "tau", "div"}  # fmt: skip
"""Commands allowed in an expression for algebra."""

FIGURES = ("angle", "triangle", "overline", "overrightarrow", "widehat", "vec", "parallel", "perp")
SYMBOL = re.compile(
    r"(?:[A-Za-z]|\\(?!text|frac|sqrt|infty|pi)[a-z]+)\s*'*(?:_(?:\w|\{[^{}]*\}))?\s*(?:\((?:[A-Za-z]\s*,?\s*)+\))?"
    r"|[fghpqFGHPQE]\s*'*(?:_(?:\w|\{[^{}]*\}))?\s*\([^()]*\)"
    r"|[A-Z]{2,3}|\|[A-Z]{2}\||\((?:\s*[A-Za-z]\s*,)+\s*[A-Za-z]\s*\)|\\text\{[^{}]*\}"
)
"""Pattern of a name on a side of an equation: `x`, `a_{n+1}`, `f'(x)`, `P(X = 3)`, `AB`, `(x,y)`."""

CURRENCIES = {"dollar": "dollar", "euro": "euro", "sterling": "pound"}
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
         "twelve": 12, "sixteen": 16}  # fmt: skip
DIGITS = r"\d{1,300}"


@dataclass(frozen=True)
class Reading:
    """A parsed answer: kind, canonical text, and the exact value or the parts."""

    kind: str
    """number, expression, words, name, base or opaque; with parts: tuple, list, named, union, matrix, ratio, relation
    or equation. `named` is a list of parts with a different symbol each.
    """
    text: str
    """Canonical text; the input of algebra for a number or an expression."""
    value: Fraction | None = None
    """Exact value of a number."""
    parts: tuple[Reading, ...] = ()
    """Parts of a compound answer, such as the entries of a tuple."""
    shape: str = ""
    """Brackets of a tuple, operators of a relation, rows of a matrix."""
    symbol: str = ""
    """Symbol equated with the value, as in `x = 3`."""
    unit: str = ""
    """Unit or counted noun after a number (`units.unit_of`); empty without any."""


def read(answer: str) -> Reading | None:
    """Parses an answer in LaTeX or plain text; returns None for an empty answer, and a reading of kind `opaque` for
    unrecognized text."""
    text = tidy(answer)
    return _parse(text) if text else None


def _parse(text: str, depth: int = 0) -> Reading:
    if depth > 12:
        return _opaque(text)
    text = re.sub(r"^([A-Z])\)$", r"\1", text.strip())
    if text == "\\reals":
        text = "(-\\infty,\\infty)"
    if re.fullmatch(r"[^,()\[\]{}]*(?<![\d,])\d{1,3}(,\d{3})+(?![\d,])[^,]*", text):
        text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    text_list = re.fullmatch(r"\\text\s*\{([^{}]*,[^{}]*)\}", text)
    text = text_list.group(1) if text_list else text
    pieces, _ = split_top_level(text, [",", ";", " or ", " and "])
    if len(pieces) > 1:
        return _list([piece for piece in pieces if piece], text, depth)
    for reader in (_related, _union, _bracketed, _matrix, _ratio, _both_signs):
        reading = reader(text, depth)
        if reading is not None:
            return reading
    return _single(text)


def _list(pieces: list[str], text: str, depth: int) -> Reading:
    parts = tuple(_parse(piece, depth + 1) for piece in pieces)
    symbols = {part.symbol for part in parts if part.symbol}
    if len(parts) < 2:
        return parts[0] if parts else _opaque(text)
    if len(symbols) == len(parts):  # x = 1, y = 2
        return Reading("named", _compact(text), parts=parts)
    if len(symbols) == 1 and parts[0].symbol:  # x = 1, 2 and x = 1 or x = 2
        return Reading(
            "list", _compact(text), parts=tuple(replace(part, symbol="") for part in parts), symbol=symbols.pop()
        )
    return Reading("list", _compact(text), parts=parts)


def _related(text: str, depth: int) -> Reading | None:
    """Parses equations, inequalities and `x \\in …`; None for other texts."""
    sides, signs = split_top_level(text, ["=", "\\in", "\\approx", *RELATIONS])
    if not signs:
        return None
    if signs == ["\\approx"] and SYMBOL.fullmatch(sides[0]):
        signs = ["="]
    if not all(sides):
        return _opaque(text)
    if signs[0] in ("=", "\\in"):
        return _equation(text, sides, signs, depth)
    if not all(sign in RELATIONS for sign in signs):
        return _opaque(text)
    kinds = [RELATIONS[sign] for sign in signs]
    if all(kind in FLIPPED for kind in kinds):
        sides, kinds = sides[::-1], [FLIPPED[kind] for kind in kinds[::-1]]
    parts = tuple(_single(side) for side in sides)
    symbol = [at for at, side in enumerate(sides) if SYMBOL.fullmatch(side)]
    if len(symbol) == 1 and all(kind in ("<", "<=") for kind in kinds) and (len(sides) == 2 or symbol == [1]):
        at = symbol[0]
        low = parts[0] if at > 0 else Reading("expression", "-\\infty")
        high = parts[-1] if at < len(parts) - 1 else Reading("expression", "\\infty")
        left = "[" if at > 0 and kinds[0] == "<=" else "("
        right = "]" if at < len(parts) - 1 and kinds[-1] == "<=" else ")"
        return Reading("tuple", _compact(text), parts=(low, high), shape=left + right, symbol=_compact(sides[at]))
    return Reading("relation", _compact(text), parts=parts, shape=" ".join(kinds))


def _equation(text: str, sides: list[str], signs: list[str], depth: int) -> Reading:
    if SYMBOL.fullmatch(sides[0]):
        rest = re.sub(r"^\s*(?:=|\\(?:in|approx))", "", text[len(sides[0]) :])
        inner = _parse(rest, depth + 1)
        if inner.symbol or inner.kind in ("equation", "opaque", "named"):
            return _opaque(text)
        names = sides[0].strip("() ").split(",")
        if len(names) > 1 and inner.shape == "()" and len(names) == len(inner.parts) == len(set(names)):
            pairs = zip(inner.parts, names, strict=True)
            return Reading("named", _compact(text), parts=tuple(replace(part, symbol=_compact(n)) for part, n in pairs))
        return replace(inner, symbol=_compact(sides[0]))
    if len(sides) == 2 and signs == ["="] and SYMBOL.fullmatch(sides[1]):
        return replace(_parse(sides[0], depth + 1), symbol=_compact(sides[1]))
    parts = tuple(_single(side) for side in sides)
    values = {part.value for part in parts}
    if len(values) == 1 and None not in values:  # 6/8 = 3/4
        return parts[-1]
    if set(signs) != {"="} or len(parts) != 2 or any(part.kind not in ("number", "expression") for part in parts):
        return _opaque(text)
    return Reading("equation", _compact(text), parts=parts)


def _union(text: str, depth: int) -> Reading | None:
    pieces, _ = split_top_level(text, ["\\cup"])
    if len(pieces) < 2:
        return None
    return Reading("union", _compact(text), parts=tuple(_parse(piece, depth + 1) for piece in pieces))


def _bracketed(text: str, depth: int) -> Reading | None:
    """Parses pairs, intervals and sets; parentheses around a single part are dropped. None for other texts."""
    for opening, closing in (("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), ("\\{", "\\}")):
        if not wrapped(text, opening, closing):
            continue
        inner = text[len(opening) : -len(closing)].strip().rstrip("\\").strip()
        pieces, _ = split_top_level(inner, [",", ";"])
        if opening == "(" and closing == ")" and len(pieces) == 1:
            return _parse(inner, depth + 1)
        if len(pieces) == 1 and opening != "\\{":
            return None
        parts = tuple(_parse(piece, depth + 1) if piece else _opaque("") for piece in pieces)
        if opening == "\\{":
            return Reading("list", _compact(inner), parts=parts)
        return Reading("tuple", _compact(text), parts=parts, shape=opening + closing)
    return None


def _matrix(text: str, depth: int) -> Reading | None:
    match = re.fullmatch(r"\\begin\s*\{(pmatrix|vmatrix|array)\}(.*)\\end\s*\{\1\}", text, re.DOTALL)
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\cr\b", match.group(2)) if row.strip()]
    parts = tuple(_parse(entry, depth + 1) for row in rows for entry in row)
    return Reading("matrix", _compact(text), parts=parts, shape=f"{match.group(1)} {[len(row) for row in rows]}")


def _ratio(text: str, depth: int) -> Reading | None:
    pieces, _ = split_top_level(text, [":"])
    if len(pieces) < 2 or not all(pieces):
        return None
    return Reading("ratio", _compact(text), parts=tuple(_single(piece) for piece in pieces))


def _both_signs(text: str, depth: int) -> Reading | None:
    """Parses `a \\pm b` as two numbers; None for other texts."""
    if text.count("\\pm") != 1 or "\\mp" in text:
        return None
    plus, minus = (text.replace("\\pm", sign).strip().removeprefix("+") for sign in "+-")
    return Reading("list", _compact(text), parts=(_single(plus), _single(minus)))


def _single(text: str) -> Reading:
    """Parses a number, optionally with a unit, an expression, or words."""
    text = text.strip()
    if wrapped(text, "(", ")"):
        return _single(text[1:-1])
    if wrapped(text, "{", "}"):
        return _single(text[1:-1])
    percent = re.fullmatch(r"(.*\d.*?)\s*(?:%|\\text\s*\{\s*percent\s*\}|percent)", text)
    if percent:
        value = number(percent.group(1))
        return _opaque(text) if value is None else _number(value / 100)
    currency = re.match(r"\\(dollar|euro|sterling)\b(?!\s*\\(?:dollar|euro|sterling))", text)
    if currency:
        inner, unit = _single(text[currency.end() :]), CURRENCIES[currency.group(1)]
        measurable = inner.kind in ("number", "expression") and inner.unit in ("", unit)
        return replace(inner, unit=unit) if measurable else _opaque(text)
    value = number(text)
    if value is not None:
        return _number(value)
    return _based(text) or _measured(text) or _worded(text) or _expression(text)


def _based(text: str) -> Reading | None:
    """Parses a number in a base: `101_2`, `(101)_{\\text{two}}`, `101 base 2`; None for other texts."""
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    match = re.fullmatch(r"\(?\s*(-?[0-9A-F]+)\s*\)?\s*(?:_\s*\{?|base)\s*(\d{1,2}|[a-z]{3,7})\s*\}?", words)
    if match is None or re.fullmatch(r"[A-F]", match.group(1)):
        return None
    base = int(match.group(2)) if match.group(2).isdigit() else BASES.get(match.group(2))
    return Reading("base", f"{match.group(1)}_{base}") if base else None


def _measured(text: str) -> Reading | None:
    """Parses a number, or an expression with a digit, followed by a unit or a counted noun; None for other texts."""
    match = re.fullmatch(r"(.*?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\circ)\s*([CF])?", text)
    if match and re.search(r"\d", match.group(1)):
        core = _expression(match.group(1)) if number(match.group(1)) is None else _single(match.group(1))
        degrees = f"degree {match.group(2)}" if match.group(2) else "degree"
        return replace(core, unit=degrees) if core.kind in ("number", "expression") else None
    match = re.fullmatch(r"(.*?)\s*((?:\\text\s*\{[^{}]*\}\s*)+)(?:\^\s*\{?\s*([23])\s*\}?)?", text)
    marked = match is not None
    match = match or re.fullmatch(r"(.*[\d})])(\s*[A-Za-z][A-Za-z .'/-]*[A-Za-z])(?:\^\s*\{?\s*([23])\s*\}?)?", text)
    if match is None or not re.search(r"\d", match.group(1)):
        return None
    words = " ".join(re.findall(r"[^\\{}]+", match.group(2).replace("\\text", " "))).strip()
    exact = number(match.group(1))
    if words.lower() in MAGNITUDES and exact is not None:
        return _number(exact * 10 ** MAGNITUDES[words.lower()])
    unit = unit_of(words, marked=marked)
    if unit is None:
        return None
    core = _number(exact) if exact is not None else _expression(match.group(1))
    if core.kind == "opaque":
        return None
    return replace(core, unit=unit + (f"^{match.group(3)}" if match.group(3) and unit else ""))


def _worded(text: str) -> Reading | None:
    """Parses words and names of figures; None for other texts."""
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    if re.fullmatch(r"[A-Z]{2,}", words.strip()) or any(f"\\{figure}" in text for figure in FIGURES):
        return Reading("name", _compact(words))
    if re.search(r"[\\^_{}=<>]", words):
        return None
    letter_runs = re.findall(r"[A-Za-z]+", words)
    bare = (
        words == text
        and not any(word in FUNCTIONS or word in ("pi", "sqrt") for word in letter_runs)
        and not re.search(r"[-+*/()\[\]|!]|^\d|^[a-z]\s", words)
        and (
            any(len(word) >= 4 or re.fullmatch(r"[A-Z][a-z]+", word) for word in letter_runs)
            or len(letter_runs) > 1 < min(map(len, letter_runs))
        )
    )
    marked = words != text and not re.search(r"\d", re.sub(r"\\text\s*\{[^{}]*\}", "", text))
    if letter_runs and (bare or marked) and re.search(r"[A-Za-z]{2}", words):
        plain_words = re.sub(r"^(?:an?|the) (?=\w\w)", "", " ".join(words.lower().split()).strip(" .()"))
        return Reading("words", plain_words)
    return None


def _expression(text: str) -> Reading:
    """Parses an expression for algebra; opaque if algebra could misread any part."""
    spelled = re.sub(r"(?<![A-Za-z\\])(pi|infty|sqrt|" + "|".join(FUNCTIONS) + r")(?![a-z])", r"\\\1 ", text)
    spelled = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", spelled.replace("*", "\\cdot "))
    spelled = re.sub(r"_(\d)(?=\s)", r"_{\1}", spelled.replace("\\div", "/"))
    known_commands = all(name in COMMANDS for name in re.findall(r"\\([A-Za-z]+)", spelled))
    letters = re.sub(r"\\[A-Za-z]+", "@", spelled)
    if (
        not known_commands
        or re.search(r"[^A-Za-z0-9+\-*/^_(){}\[\]|!.' \\]|\\[^A-Za-z]|\\$", spelled)
        or re.search(r"[A-Za-z]{4}|\d\s+\.?\d|\d\.\s*\d*\.|\.\s*\.|[-+]\s*[-+]|[-+^_\\]$|\d{301}|\^\s*\\circ", letters)
        or re.search(r"\d\s*\\frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}", spelled)  # 2\frac{1}{2}x: a sum or a product
        or not re.search(r"[A-Za-z0-9]", spelled)
    ):
        return _opaque(text)
    exact = re.sub(r"(?<![\d_])(\d*)\.(\d+)", _as_fraction, spelled)
    return Reading("expression", _compact(exact))


def _as_fraction(match: re.Match[str]) -> str:
    """Rewrites `0.25` as `\\frac{25}{100}`: decimals are exact."""
    return f"\\frac{{{int(match.group(1) + match.group(2))}}}{{{10 ** len(match.group(2))}}}"


def number(text: str) -> Fraction | None:
    r"""Returns the exact value of a number, such as `-12`, `0.5`, `3/4`, `1 1/2`, `0.\overline{6}` or `2\cdot10^3`;
    None for any other text, also for a denominator 0 and for a mixed number like `2 3/2`."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    text = re.sub(r"^[-+]\s*", "", text, count=1)
    if re.fullmatch(rf"(?:{DIGITS})?\.\d{{1,300}}|{DIGITS}\.?", text):
        return sign * Fraction(text.rstrip(".") or "0")
    match = re.fullmatch(rf"({DIGITS})?\s*\\frac\s*\{{\s*(-?\s*{DIGITS})\s*\}}\s*\{{\s*(-?\s*{DIGITS})\s*\}}", text)
    match = match or re.fullmatch(rf"(?:({DIGITS})\s+)?({DIGITS})\s*/\s*({DIGITS})", text)
    if match:
        over, under = (int(match.group(at).replace(" ", "")) for at in (2, 3))
        if under == 0 or (match.group(1) is not None and not 0 < over < under):  # 2 3/2 is not a mixed number
            return None
        return sign * (Fraction(over, under) + int(match.group(1) or 0))
    match = re.fullmatch(r"(\d{0,50})\.(\d{0,50})\s*\\overline\s*\{\s*(\d{1,50})\s*\}", text)
    if match:
        integer, fixed, repeating = match.groups()
        tail = Fraction(int(repeating), 10 ** len(repeating) - 1) / 10 ** len(fixed)
        return sign * (Fraction(int(integer + fixed or "0"), 10 ** len(fixed)) + tail)
    match = re.fullmatch(r"(\d{0,50})\.(\d{1,50})\s*\\ldots", text)
    if match:  # a block repeated three times at the end continues forever
        integer, digits = match.groups()
        block = re.search(r"(\d+?)\1\1$", digits)
        exact = block and number(f"{integer}.{digits[: block.start()]}\\overline{{{block.group(1)}}}")
        return None if exact is None else sign * exact
    match = re.fullmatch(r"(\d{1,50}(?:\.\d{1,50})?)[eE](?:([-+]?\d{1,3}))", text)
    if match:
        return sign * Fraction(match.group(1)) * Fraction(10) ** int(match.group(2))
    match = re.fullmatch(r"(\d{1,50}(?:\.\d{1,50})?)\s*\\cdot\s*10\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(\d))", text)
    if match:
        return sign * Fraction(match.group(1)) * Fraction(10) ** int(match.group(2) or match.group(3))
    return None


def _number(value: Fraction) -> Reading:
    top, bottom = value.numerator, value.denominator
    return Reading("number", str(top) if bottom == 1 else f"\\frac{{{top}}}{{{bottom}}}", value)


def _opaque(text: str) -> Reading:
    return Reading("opaque", " ".join(text.split()))


def _compact(text: str) -> str:
    """Returns the text without meaningless spaces, and without braces around single characters."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"(?<![A-Za-z]) | (?![A-Za-z])", "", text) if "\\" in text else text.replace(" ", "")
    return re.sub(r"([\^_])\{(\w)\}(?!\d)", r"\1\2", text)
