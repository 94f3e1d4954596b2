"""Checks for unfinished answers: algebra finds the question's own expression equal to its result, but repeating the
question is no answer.

Three rules refuse an answer:

- Work is left undone that gold does: a sum where gold is a single term, or several operations where gold is a
  number.
- The question asks for factors, and the answer shows fewer factors than gold.
- An expression is copied from the question, possibly with the terms reordered, and gold is written differently.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from .latex import tidy, wrapped
from .reading import FUNCTIONS, Reading, read

PLAIN = r"\(?(?:\d+|\\frac\{\d+\}\{\d+\})\)?"
GROUP = rf"(?:\{{-?{PLAIN}\}}|\(-?{PLAIN}\)|{PLAIN})"
ONE_STEP = re.compile(
    rf"-?(?:{PLAIN}\^{GROUP}|{PLAIN}!|\\sqrt(?:\[\d+\])?{GROUP}|\\binom{GROUP}{GROUP}"
    rf"|\\(?:{'|'.join(FUNCTIONS)})(?:_{GROUP})?{GROUP})"
)
"""One operation on plain numbers: `2^{10}`, `5!`, `\\binom{5}{2}`, `\\log_2 8`."""
TERM = re.compile(r"(?<=[\w)}\]!.])\s*[-+]")
"""Sign between two terms, other than a leading sign."""
SIMPLE = ("frac", "sqrt", "cdot", "pi")
TOKEN = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|[-+*/^!=<>(]")
NO_OPS = re.compile(r"[-+]\s*0+(?![\d.])(?:\s*[a-z](?:\^\d|\^\{\d+\})?)*|(?:\\cdot|/|\^)\s*\{?1\}?(?![\d.])")
INNER = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
FRACTION = re.compile(rf"\\frac\s*{INNER}\s*{INNER}")
BRACKETED = re.compile(r"\(\s*(\w|\d+)\s*\)")
OPERATORS = {"\\frac": "/", "\\div": "/", "\\cdot": "*"}
OPERATIONS = {*"+-/^!=<>"} | {
    f"\\{name}" for name in (*FUNCTIONS, "sqrt", "binom", "le", "ge", "pm", "overline", "ldots")
}
BETWEEN = frozenset("+-^=<>")
"""Tokens never at the start (except a minus) or at the end of an expression."""
TASKS = (
    *("simplif", "evaluat", "comput", "calculat", "rationali", "express", "writ", "reduc", "find", "what", "determin"),
    *("convert", "equivalent"),
)
"""Prefixes of words that ask to work out the next value."""
NEAR = 12
"""Maximum number of tokens between such a word and the value, none of them `=`."""
TO_FACTOR = re.compile(r"(?i)\bfactor(?:ed|ing|i[sz](?:e|ed|es|ing|ation))?\b")
FACTOR = re.compile(r"\([^()]*\)(?:\^\{?(\d{1,3})\}?)?")
LONGEST_WORD = 3
"""Maximum length of a run of letters read as a product; longer runs are words."""
QUESTION = 20_000
"""Number of characters of a question to search, counted from the end."""


def unfinished(gold: Reading, answer: Reading) -> bool:
    """Returns True if an answer leaves work undone that gold does, although algebra finds both equal.

    If gold is a single term, a sum is unfinished. If gold is a number, everything is unfinished except for a number,
    such as 2/4, and a single power, root, factorial, binomial or function of numbers.

    Args:
        gold: Reading of the right answer, a number or an expression.
        answer: Reading of the answer to check, a number or an expression.
    """
    if answer.value is not None or gold.text == answer.text:
        return False
    if gold.value is not None:
        return ONE_STEP.fullmatch(answer.text) is None
    single = not TERM.search(gold.text) and all(name in SIMPLE for name in re.findall(r"\\([A-Za-z]+)", gold.text))
    return single and TERM.search(answer.text) is not None


def copied(gold: str, answer: str, question: str) -> bool:
    """Returns True if an expression of the answer occurs in the question, perhaps reordered, and gold is written
    differently. An expression has an operation. A value such as 2/4 or √8 counts only where the question asks to work
    it out. False if a text cannot be read, or without a question.

    Args:
        gold: The right answer.
        answer: An answer equal to gold.
        question: The question; only the last `QUESTION` characters are searched.
    """
    answer_reading, gold_reading = read(answer), read(gold)
    if answer_reading is None or gold_reading is None or not question:
        return False
    question_tokens = tokens(tidy(question[-QUESTION:]))
    gold_forms = [_form(part.text) for part in _leaves(gold_reading)] + [_form(tidy(gold))]
    for text in _unfinished_parts(answer_reading, tidy(answer)):
        answer_tokens = tokens(text)
        if not OPERATIONS & set(answer_tokens) or _form(text) in gold_forms:
            continue
        if any(
            not _is_value(text) or _asks_for_result(question_tokens[:start])
            for start in _positions(question_tokens, answer_tokens)
        ):
            return True
    return False


def unfactored(gold: str, answer: str, question: str) -> bool:
    """Returns True if a question asks for factors, and an answer has a sum outside factors, or fewer factors than gold.

    Args:
        gold: The right answer.
        answer: An answer equal to gold.
        question: The question.
    """
    if not TO_FACTOR.search(question[-QUESTION:]):
        return False
    gold_factors, answer_factors = _factors(tidy(gold)), _factors(tidy(answer))
    return gold_factors > 0 and answer_factors < gold_factors


def _form(text: str) -> Counter[str]:
    """Counts the tokens of a text, ignoring brackets."""
    return Counter(token for token in tokens(text) if token != "(")


def _factors(text: str) -> int:
    """Counts the bracketed sums in a product, each as often as the power says; 0 if there is a sum outside brackets."""
    text = text.lstrip("- ")
    if wrapped(text, "(", ")"):
        return 0
    powers = [int(match.group(1) or 1) for match in FACTOR.finditer(text) if TERM.search(match.group(0))]
    return 0 if TERM.search(FACTOR.sub(" x ", text)) else sum(powers)


def tokens(text: str) -> list[str]:
    """Returns the tokens of a LaTeX text in order: numbers (decimals as fractions), letters, words of more than
    `LONGEST_WORD` letters, operations and opening brackets. Left out are multiplication signs and parts without effect,
    such as `+0x`, `^1` and the brackets of `(2)`."""
    text = FRACTION.sub(r"(\1)/(\2)", NO_OPS.sub(" ", text.replace("*", "\\cdot ")))
    text = BRACKETED.sub(r" \1 ", text)
    result: list[str] = []
    for token in TOKEN.findall(text):
        if token[0].isdigit() or token[0] == ".":
            result.append(str(Fraction(token)))
        elif token.isalpha() and len(token) <= LONGEST_WORD:
            result.extend(token)
        else:
            result.append(OPERATORS.get(token, token))
    return [token for token in result if token != "*"]


def _unfinished_parts(reading: Reading, written: str) -> list[str]:
    """Returns the texts of the parts that could still be worked out."""
    if reading.kind == "number":
        written = written.split("=")[-1].strip()
        if re.search(r"\\(?:overline|ldots)", written):
            return [written]
        fraction = re.fullmatch(r"-?\s*(?:\\frac\s*\{\s*-?(\d+)\s*\}\s*\{\s*-?(\d+)\s*\}|(\d+)\s*/\s*(\d+))", written)
        terms = [int(group) for group in fraction.groups() if group] if fraction else [1, 1]
        reduced = reading.value is not None and abs(reading.value.denominator) == terms[1]
        return [] if fraction is None or reduced else [written]
    if reading.kind in ("expression", "equation", "relation"):
        return [reading.text]
    return [text for part in reading.parts for text in _unfinished_parts(part, part.text)]


def _leaves(reading: Reading) -> list[Reading]:
    return [reading, *(leaf for part in reading.parts for leaf in _leaves(part))]


def _is_value(text: str) -> bool:
    """Returns True for a single number with at most fractions, roots and powers: a question may state such a value as
    the answer.
    """
    names = re.findall(r"\\([A-Za-z]+)", text)
    letters = re.search(r"[A-Za-z!]", re.sub(r"\\[A-Za-z]+", " ", text))
    return not letters and not TERM.search(text) and set(names) <= {"frac", "sqrt", "pi", "overline", "ldots"}


def _asks_for_result(tokens_before: list[str]) -> bool:
    """Returns True if the question's tokens before an expression ask to work out the expression."""
    near = tokens_before[-NEAR:]
    while "=" in near:
        near = near[near.index("=") + 1 :]
    return any(token.lower().startswith(TASKS) for token in near)


def _positions(question_tokens: list[str], pattern: list[str]) -> Iterator[int]:
    """Yields the positions where the same tokens stand together in the question, in any order."""
    size, pattern_counts = len(pattern), Counter(pattern)
    window_counts = Counter(question_tokens[:size])
    for end in range(size, len(question_tokens) + 1):
        if (
            window_counts == pattern_counts
            and question_tokens[end - 1] not in BETWEEN
            and (pattern[0] == "-" or question_tokens[end - size] not in BETWEEN)
        ):
            yield end - size
        if end < len(question_tokens):
            window_counts[question_tokens[end]] += 1
            window_counts[question_tokens[end - size]] -= 1
            if not window_counts[question_tokens[end - size]]:
                del window_counts[question_tokens[end - size]]
