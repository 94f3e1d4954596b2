"""Has an answer been worked out? Algebra finds the question's own expression equal to its result; that is no answer.

Three rules. What is left to be done where gold has done it: a sum where gold is a single term, more than one operation
where gold is a number. What was to be factored has fewer factors than gold. And what stands in the question already: an
expression that is copied from it, also with its terms in another order, where gold is written in another way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from skyrl_mega.envs.math.latex import tidy, wrapped
from skyrl_mega.envs.math.reading import FUNCTIONS, Reading, read

PLAIN = r"\(?(?:\d+|\\frac\{\d+\}\{\d+\})\)?"
GROUP = rf"(?:\{{-?{PLAIN}\}}|\(-?{PLAIN}\)|{PLAIN})"
ONE_STEP = re.compile(
    rf"-?(?:{PLAIN}\^{GROUP}|{PLAIN}!|\\sqrt(?:\[\d+\])?{GROUP}|\\binom{GROUP}{GROUP}"
    rf"|\\(?:{'|'.join(FUNCTIONS)})(?:_{GROUP})?{GROUP})"
)
"""One operation on plain numbers: `2^{10}`, `5!`, `\\binom{5}{2}`, `\\log_2 8`."""
TERM = re.compile(r"(?<=[\w)}\]!.])\s*[-+]")
"""A sign between two terms, not in front of one."""
SIMPLE = ("frac", "sqrt", "cdot", "pi")
TOKEN = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|[-+*/^!=<>(]")
NOTHING = re.compile(r"[-+]\s*0+(?![\d.])(?:\s*[a-z](?:\^\d|\^\{\d+\})?)*|(?:\\cdot|/|\^)\s*\{?1\}?(?![\d.])")
INNER = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
FRACTION = re.compile(rf"\\frac\s*{INNER}\s*{INNER}")
ALONE = re.compile(r"\(\s*(\w|\d+)\s*\)")
SPOKEN = {"\\frac": "/", "\\div": "/", "\\cdot": "*"}
OPERATIONS = {*"+-/^!=<>"} | {
    f"\\{name}" for name in (*FUNCTIONS, "sqrt", "binom", "le", "ge", "pm", "overline", "ldots")
}
BETWEEN = frozenset("+-^=<>")
"""What no expression begins with, but for a minus, and none ends with."""
TASKS = (
    *("simplif", "evaluat", "comput", "calculat", "rationali", "express", "writ", "reduc", "find", "what", "determin"),
    *("convert", "equivalent"),
)
"""How words begin that say what is to be worked out: the value that follows them."""
NEAR = 12
"""Tokens between such a word and the value, none of them `=`."""
TO_FACTOR = re.compile(r"(?i)\bfactor(?:ed|ing|i[sz](?:e|ed|es|ing|ation))?\b")
FACTOR = re.compile(r"\([^()]*\)(?:\^\{?(\d{1,3})\}?)?")
LONGEST_WORD = 3
"""Letters in a row that may be a product; longer ones are words."""
QUESTION = 20_000
"""Characters of a question that are looked at, its last."""


def unfinished(gold: Reading, answer: Reading) -> bool:
    """Whether an answer leaves something to be worked out that gold has worked out.

    Args:
        gold: A number or an expression.
        answer: The same.
    """
    if answer.value is not None or gold.text == answer.text:
        return False
    if gold.value is not None:
        return ONE_STEP.fullmatch(answer.text) is None
    single = not TERM.search(gold.text) and all(name in SIMPLE for name in re.findall(r"\\([A-Za-z]+)", gold.text))
    return single and TERM.search(answer.text) is not None


def copied(gold: str, answer: str, question: str) -> bool:
    """Whether what an answer says stands in the question, is no plain number, and is not how gold is written.

    Args:
        gold: The right answer.
        answer: Another that is equal to it.
        question: What was asked.
    """
    said, right = read(answer), read(gold)
    if said is None or right is None or not question:
        return False
    asked = tokens(tidy(question[-QUESTION:]))
    known = [_form(part.text) for part in _leaves(right)] + [_form(tidy(gold))]
    for text in _open(said, tidy(answer)):
        found = tokens(text)
        if not OPERATIONS & set(found) or _form(text) in known:
            continue
        if any(not _is_value(text) or _told(asked[:start]) for start in _windows(asked, found)):
            return True
    return False


def unfactored(gold: str, answer: str, question: str) -> bool:
    """Whether a question asks for factors and an answer has a sum outside of them, or fewer than gold."""
    if not TO_FACTOR.search(question[-QUESTION:]):
        return False
    want, found = _factors(tidy(gold)), _factors(tidy(answer))
    return want > 0 and found < want


def _form(text: str) -> Counter[str]:
    """How a text is written, whatever its brackets."""
    return Counter(token for token in tokens(text) if token != "(")


def _factors(text: str) -> int:
    """Sums in brackets that are multiplied, each as often as its power says; 0 where there is a sum outside of them."""
    text = text.lstrip("- ")
    if wrapped(text, "(", ")"):
        return 0
    powers = [int(match.group(1) or 1) for match in FACTOR.finditer(text) if TERM.search(match.group(0))]
    return 0 if TERM.search(FACTOR.sub(" x ", text)) else sum(powers)


def tokens(text: str) -> list[str]:
    """Numbers, letters, operations, opening brackets; nothing that changes nothing: `+0x`, `\\cdot 1`, `^1`, `(2)`."""
    text = FRACTION.sub(r"(\1)/(\2)", NOTHING.sub(" ", text.replace("*", "\\cdot ")))
    text = ALONE.sub(r" \1 ", text)
    found: list[str] = []
    for token in TOKEN.findall(text):
        if token[0].isdigit() or token[0] == ".":
            found.append(str(Fraction(token)))
        elif token.isalpha() and len(token) <= LONGEST_WORD:
            found.extend(token)
        else:
            found.append(SPOKEN.get(token, token))
    return [token for token in found if token != "*"]


def _open(reading: Reading, written: str) -> list[str]:
    """The texts of those parts that could still be worked out."""
    if reading.kind == "number":
        written = written.split("=")[-1].strip()
        if re.search(r"\\(?:overline|ldots)", written):
            return [written]
        fraction = re.fullmatch(r"-?\s*(?:\\frac\s*\{\s*-?(\d+)\s*\}\s*\{\s*-?(\d+)\s*\}|(\d+)\s*/\s*(\d+))", written)
        numbers = [int(found) for found in fraction.groups() if found] if fraction else [1, 1]
        reduced = reading.value is not None and abs(reading.value.denominator) == numbers[1]
        return [] if fraction is None or reduced else [written]
    if reading.kind in ("expression", "equation", "relation"):
        return [reading.text]
    return [text for part in reading.parts for text in _open(part, part.text)]


def _leaves(reading: Reading) -> list[Reading]:
    return [reading, *(leaf for part in reading.parts for leaf in _leaves(part))]


def _is_value(text: str) -> bool:
    """Whether a text is one number with at most fractions, roots and powers: a question may give it, and mean it."""
    names = re.findall(r"\\([A-Za-z]+)", text)
    letters = re.search(r"[A-Za-z!]", re.sub(r"\\[A-Za-z]+", " ", text))
    return not letters and not TERM.search(text) and set(names) <= {"frac", "sqrt", "pi", "overline", "ldots"}


def _told(before: list[str]) -> bool:
    """Whether the question says to work out what stands behind these tokens."""
    near = before[-NEAR:]
    while "=" in near:
        near = near[near.index("=") + 1 :]
    return any(token.lower().startswith(TASKS) for token in near)


def _windows(asked: list[str], found: list[str]) -> Iterator[int]:
    """Where the same tokens stand together in the question, in any order."""
    size, want = len(found), Counter(found)
    here = Counter(asked[:size])
    for end in range(size, len(asked) + 1):
        if here == want and asked[end - 1] not in BETWEEN and (found[0] == "-" or asked[end - size] not in BETWEEN):
            yield end - size
        if end < len(asked):
            here[asked[end]] += 1
            here[asked[end - size]] -= 1
            if not here[asked[end - size]]:
                del here[asked[end - size]]
