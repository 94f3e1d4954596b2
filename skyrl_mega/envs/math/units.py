"""Words after a number: units of measurement, counted nouns, and words with another meaning."""

from __future__ import annotations

import re


def _words(text: str) -> list[str]:
    return text.split()


MEASURES = {
    "cm": "centimeter centimetre cc", "mm": "millimeter millimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch", "ft": "foot feet", "yd": "yard", "mi": "mile", "sec": "second s", "min": "minute",
    "hr": "hour h", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "kg": "kilogram", "g": "gram gm", "lb": "pound",
    "oz": "ounce", "ton": "ton tonne", "l": "liter litre", "ml": "milliliter millilitre", "gal": "gallon",
    "dollar": "dollar usd buck", "cent": "cent", "euro": "euro", "degree": "degree deg", "radian": "radian rad",
    "C": "celsius", "F": "fahrenheit", "am": "am", "pm": "pm",
    "mph": "mph", "unit": "unit", "watt": "watt", "volt": "volt", "acre": "acre",
}  # fmt: skip
"""Unit of measurement → further words for the unit."""
MEASURE_OF_WORD = {word: name for name, words in MEASURES.items() for word in (name, *words.split())}
COUNTED = frozenset(
    _words(
        "way integer student meal edge digit multiple point solution root person people child boy girl dog "
        "cat coin card ball marble book apple orange triangle square rectangle side face vertex vertice "
        "number value time mark page step factor divisor term zero prime positive distinct right different "
        "possible ordered pair game team vote seat sq cubic per each total a an the of cup pint quart gallon "
        "tablespoon teaspoon spoon cookie candy cake slice pizza egg bottle can box bag jar basket piece item "
        "toy car truck bus train bike bicycle chair table room house tree flower leaf row column ticket stamp sticker "
        "pencil pen crayon shirt shoe sock hat friend family member player worker employee customer visitor adult kid "
        "man men woman women teacher class school fish bird cow horse sheep chicken duck rabbit pig animal plant "
        "lap trip question problem test combination arrangement permutation subset element set group "
        "line segment circle angle diagonal block tile stone rock song word letter message call photo picture video "
        "paper sheet brick board night goal run win loss possibility squared cubed"
    )
)
"""Words allowed after a number outside `\\text{}`, besides the measures."""

AFTER_NOUN = frozenset(
    _words("of to in from per that with for each on by left total altogether remaining away long tall")
)
"""Words after the end of a counted noun."""
SAME_NOUNS = {"men": "man", "women": "woman", "children": "child", "kid": "child", "vertice": "vertex"}
CONTRASTS = [
    frozenset(_words(words))
    for words in (
        "boy girl", "man woman", "child adult", "student teacher", "row column", "win loss", "head tail",
        "face edge vertex diagonal", "triangle square rectangle circle pentagon hexagon", "combination permutation",
        "apple pear orange banana peach plum lemon grape", "cat dog cow horse sheep pig chicken duck rabbit bird fish",
        "car truck bus train bike bicycle", "red blue green yellow white black orange purple",
        "penny nickel dime quarter", "cup pint quart tablespoon teaspoon spoon",
        "florin zloty yen yuan peso rupee franc ruble krona crown shilling pence",
    )
]  # fmt: skip
"""Groups of nouns that exclude each other. Others may count the same: kids and children, solutions and pairs."""

MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Word → power of ten."""
MEANING_CHANGES = frozenset(
    _words(
        "is are was not or and wrong at least most more less than about approximately around between to if "
        "when where for but except then so because half twice dozen score no none nor either neither without "
        "minus plus times over mod remainder base incorrect false true maybe unless up percent pi "
    )
)
"""Words that change the meaning of a number."""


def unit_of(words: str, *, marked: bool) -> str | None:
    """Returns the unit, or the counted noun, named by the words after a number; None for words with another meaning,
    for more than 6 words, and for no words.

    Args:
        words: `square inches`, `cm`, `p.m.`, `different ways`.
        marked: True for words inside `\\text{}`; outside `\\text{}` only known words count.
    """
    if re.search(r"[^A-Za-z .'/-]", words):
        return None
    tokens = re.findall(r"[a-z]+", re.sub(r"\b([ap])\.?\s*m\b\.?", r"\1m", words.lower()))
    if not tokens or len(tokens) > 6 or MEANING_CHANGES & set(tokens):
        return None
    single = [_single(word) for word in tokens]
    if not marked and not all(word in MEASURE_OF_WORD or word in COUNTED for word in single):
        return None
    power = "^2" if {"square", "sq", "squared"} & {*single} else "^3" if {"cubic", "cubed", "cc"} & {*single} else ""
    measures = [MEASURE_OF_WORD[word] for word in single if word in MEASURE_OF_WORD]
    if "per" in single and measures[:2] == ["mi", "hr"]:
        return "mph"
    if len(measures) > 1:
        return " ".join(measures)
    return measures[0] + power if measures else _noun(single)


def agree(one: str, other: str) -> bool:
    """Returns True if two units, as returned by `unit_of` or empty, may be the same.

    A missing unit agrees with any unit, and plain degrees agree with degrees Celsius and Fahrenheit. A measure agrees
    with no other measure and no noun; two nouns agree unless listed in `CONTRASTS` as exclusive.
    """
    if not one or not other or one == other:
        return True
    if _measured(one) or _measured(other):
        return "degree" in (one, other) and one.startswith("degree") and other.startswith("degree")
    return not any(one in nouns and other in nouns for nouns in CONTRASTS)


def _measured(unit: str) -> bool:
    return "^" in unit or unit.split()[0] in MEASURES


def _single(word: str) -> str:
    if word in MEASURE_OF_WORD or len(word) < 3 or word.endswith("ss"):
        return word
    if re.search(r"(?:x|ch|sh|ss)es$", word):
        return word[:-2]
    if word.endswith("ies") and word[:-1] not in COUNTED:
        return word[:-3] + "y"
    return word.removesuffix("s")


def _noun(words: list[str]) -> str:
    """Returns the counted noun: `way` for "different ways to sit"."""
    end = next((at for at, word in enumerate(words) if at and word in AFTER_NOUN), len(words))
    noun = words[end - 1]
    return SAME_NOUNS.get(noun, noun)
