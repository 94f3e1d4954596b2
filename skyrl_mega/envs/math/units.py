"""Words behind a number: units of measurement, what is counted, and words that say something else."""

from __future__ import annotations

import re


def _words(text: str) -> list[str]:
    return text.split()


MEASURES = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "sec": "second s", "min": "minute",
    "hr": "hour h",
    "day": "day", "week": "week", "month": "month", "year": "year yr", "kg": "kilogram", "g": "gram gm", "lb": "pound",
    "oz": "ounce", "ton": "ton tonne", "l": "liter litre", "ml": "milliliter millilitre", "gal": "gallon",
    "dollar": "dollar usd buck", "cent": "cent", "euro": "euro", "degree": "degree deg", "radian": "radian rad",
    "mph": "mph", "unit": "unit", "watt": "watt", "volt": "volt", "acre": "acre",
}  # fmt: skip
KNOWN = {word: name for name, words in MEASURES.items() for word in (name, *words.split())}
COUNTED = frozenset(
    _words(
        "way integer student meal edge digit multiple point solution root person people child boy girl dog "
        "cat coin card ball marble book apple orange triangle square rectangle side face vertex vertice "
        "number value time mark page step factor divisor term zero prime positive distinct right different "
        "possible ordered pair game team vote seat sq cubic per each total a an the of "
    )
)
"""What may stand behind a number outside of `\\text{}` beside the measures."""

MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
OTHERWISE = frozenset(
    _words(
        "is are was not or and wrong at least most more less than about approximately around between to if "
        "when where for but except then so because half twice dozen score no none nor either neither without "
        "minus plus times over mod remainder base incorrect false true maybe unless up percent pi "
    )
)
"""Words that change what a number says."""


def unit_of(words: str, *, marked: bool) -> str | None:
    """The unit that words behind a number name: "" where they count things, None where they say something else.

    Args:
        words: `square inches`, `cm`, `ways`.
        marked: They stand in `\\text{}`; outside of it only known words count.
    """
    found = re.findall(r"[a-z]+", words.lower())
    if not found or len(found) > 6 or re.search(r"[^A-Za-z .'/-]", words) or OTHERWISE & set(found):
        return None
    singular = [word.removesuffix("s") if len(word) > 2 else word for word in found]
    if not marked and not all(word in KNOWN or word in COUNTED for word in singular):
        return None
    power = "^2" if {"square", "sq"} & set(singular) else "^3" if "cubic" in singular else ""
    measures = [KNOWN[word] for word in singular if word in KNOWN]
    if "per" in singular and measures[:2] == ["mi", "hr"]:
        return "mph"
    if len(measures) > 1:
        return " ".join(measures)
    return measures[0] + power if measures else ""
