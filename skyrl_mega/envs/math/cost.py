"""Cost estimates for algebra, from an expression's text alone: expressions too expensive to finish are never passed on.

The text is read once, from left to right, and every part gets a size: the number of terms when multiplied out over a
common denominator, the bits of the numbers, and the degree. Only these bounds are computed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

BITS = 40_000
"""Maximum number of bits of all evaluated numbers: `1007^{1007}` takes 10,000."""
TERMS = 128
"""Maximum number of terms when multiplied out, in the numerator and in the denominator."""
WIDTH = 300
"""Maximum product of terms and letters: greatest common divisors take longer with more variables."""
DEGREE = 3000
"""Maximum degree."""
DEPTH = 20
"""Maximum nesting of brackets, fractions, roots and functions."""
ROOTS, FUNCTIONS, LETTERS = 8, 8, 8
"""Maximum numbers of roots, functions and different letters: simplification grows with the combinations."""
BINOMIAL_K = 20
"""Largest k of a `\\binom{n}{k}` with letters."""
FACTORIAL = 1000
"""Largest n of a factorial."""
SMALL = 10**18
"""Largest numerator and denominator of a constant whose exact value is kept."""

TOKEN = re.compile(r"\\[A-Za-z]+|\d+|[^\s.]")
NAMED = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\arcsin", "\\arccos", "\\arctan", "\\sinh", "\\cosh",
         "\\tanh", "\\log", "\\ln", "\\exp")  # fmt: skip
CLOSING = {"(": ")", "{": "}", "[": "]", "|": "|"}
SIGNS = ("+", "-")
ENDS = (")", "}", "]")


class TooMuch(Exception):
    """The expression is too expensive for algebra, or unreadable."""


@dataclass(frozen=True)
class ExpressionSize:
    """Upper bounds for the size of a part of an expression."""

    top: float = 1
    """Number of terms in the numerator."""
    bottom: float = 1
    """Number of terms in the denominator."""
    bits: float = 0
    """Number of bits of all numbers."""
    degree: float = 0
    """Degree in all letters together."""
    value: Fraction | None = None
    """Exact value of a small constant."""
    rational: bool = False
    """True for a part without letters, roots and functions."""


def too_expensive(text: str) -> bool:
    """Returns True if an expression in LaTeX exceeds a limit of this file, or is unreadable; computes nothing large."""
    try:
        reader = _Reader(TOKEN.findall(text))
        size = reader.sum(0)
        wide = max(size.top, size.bottom) * len(reader.letters) > WIDTH
        return (
            wide
            or reader.left()
            or reader.roots > ROOTS
            or reader.functions > FUNCTIONS
            or len(reader.letters) > LETTERS
        )
    except TooMuch:
        return True


def _checked(size: ExpressionSize) -> ExpressionSize:
    if max(size.top, size.bottom) > TERMS or size.bits > BITS or size.degree > DEGREE:
        raise TooMuch
    return replace(size, top=1.0, bottom=1.0) if size.rational else size


def _exact(size: ExpressionSize, value: Fraction | None) -> ExpressionSize:
    small = value is not None and abs(value.numerator) <= SMALL and value.denominator <= SMALL
    return _checked(replace(size, value=value if small else None))


def _added(one: ExpressionSize, other: ExpressionSize) -> ExpressionSize:
    size = ExpressionSize(
        one.top * other.bottom + other.top * one.bottom,
        one.bottom * other.bottom,
        one.bits + other.bits,
        max(one.degree, other.degree),
        rational=one.rational and other.rational,
    )
    return _exact(size, None if one.value is None or other.value is None else one.value + other.value)


def _multiplied(one: ExpressionSize, other: ExpressionSize) -> ExpressionSize:
    size = ExpressionSize(
        one.top * other.top,
        one.bottom * other.bottom,
        one.bits + other.bits,
        one.degree + other.degree,
        rational=one.rational and other.rational,
    )
    return _exact(size, None if one.value is None or other.value is None else one.value * other.value)


def _signed(size: ExpressionSize, sign: int) -> ExpressionSize:
    return replace(size, value=None if size.value is None else sign * size.value)


def _reciprocal(size: ExpressionSize) -> ExpressionSize:
    """Returns the size of the reciprocal."""
    value = 1 / size.value if size.value else None
    return replace(size, top=size.bottom, bottom=size.top, value=value)


def _power(base: ExpressionSize, exponent: ExpressionSize) -> ExpressionSize:
    value = exponent.value
    times = _largest(exponent)
    if max(base.bits, 1) * times > BITS or base.degree * times > DEGREE:
        raise TooMuch
    size = ExpressionSize(
        _terms(base.top, times),
        _terms(base.bottom, times),
        base.bits * times,
        base.degree * times,
        rational=base.rational and value is not None and value.denominator == 1,
    )
    exact = base.value**times if size.rational and base.value and size.bits < 256 else None
    size = _exact(size, exact)
    return _reciprocal(size) if value is not None and value < 0 else size


def _largest(size: ExpressionSize) -> int:
    """Returns an upper bound of the magnitude. Letters may cancel, so only the numbers count: `n-n+9` is 9."""
    if size.value is not None:
        return math.ceil(abs(size.value))
    if size.bits > math.log2(BITS):
        raise TooMuch
    return math.ceil(2**size.bits)


def _terms(count: float, times: int) -> float:
    """Returns the number of terms of a `count`-term sum raised to the power `times`."""
    if count == 1:
        return 1
    if times > TERMS:
        raise TooMuch
    return math.comb(int(count) + times - 1, times)


def _factorial(size: ExpressionSize) -> ExpressionSize:
    largest = _largest(size)
    if largest > FACTORIAL or size.top * size.bottom > 4:
        raise TooMuch
    bits = largest * math.log2(max(2, largest)) if largest > 1 else 1
    return _checked(replace(size, top=1, bottom=1, bits=bits, value=None))


def _binomial(over: ExpressionSize, under: ExpressionSize) -> ExpressionSize:
    if over.value is not None and under.value is not None:
        bits = max(0.0, float(under.value)) * math.log2(max(2.0, abs(float(over.value))))
        return _checked(ExpressionSize(bits=bits, rational=True))
    if _largest(under) > BINOMIAL_K:
        raise TooMuch
    size = _multiplied(over, under)
    return _checked(replace(size, top=1, bottom=1, bits=float(_largest(over)), value=None))


class _Reader:
    """Recursive-descent parser that computes the size of each part."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.roots = self.functions = 0
        self.letters: set[str] = set()
        self.bars = 0
        """1 if the innermost open group is an absolute value, else 0."""

    def left(self) -> bool:
        return self.at < len(self.tokens)

    def next(self) -> str:
        return self.tokens[self.at] if self.left() else ""

    def take(self, *allowed: str) -> str:
        token = self.next()
        if not token or (allowed and token not in allowed):
            raise TooMuch
        self.at += 1
        return token

    def sum(self, depth: int) -> ExpressionSize:
        """Parses terms between signs."""
        size = self.term(depth)
        while self.next() in SIGNS:
            size = _added(size, self.term(depth))
        return size

    def term(self, depth: int) -> ExpressionSize:
        """Parses a product with leading signs."""
        sign = 1
        while self.next() in SIGNS:
            sign = -sign if self.take() == "-" else sign
        return _signed(self.product(depth), sign)

    def product(self, depth: int) -> ExpressionSize:
        """Parses factors, with or without an operator in between."""
        size = self.factor(depth)
        while self.left() and self.next() not in (*ENDS, *SIGNS) and not (self.next() == "|" and self.bars):
            sign = self.take() if self.next() in ("\\cdot", "*", "/") else ""
            negative = bool(sign) and self.next() == "-" and bool(self.take())
            other = _signed(self.factor(depth), -1 if negative else 1)
            size = _multiplied(size, _reciprocal(other) if sign == "/" else other)
        return size

    def factor(self, depth: int) -> ExpressionSize:
        """Parses an atom with powers, factorials and indices."""
        size = self.atom(depth)
        while self.next() in ("^", "!", "_", "'"):
            sign = self.take()
            if sign == "^":
                size = _power(size, self.argument(depth))
                if self.next() == "^":  # x^2^3 is ambiguous
                    raise TooMuch
            elif sign == "!":
                if self.next() == "!":
                    raise TooMuch
                size = _factorial(size)
            elif sign == "_":
                self.argument(depth)
        return size

    def argument(self, depth: int) -> ExpressionSize:
        """Parses an argument, for example after `^` or `_`: a group, or a single atom. Bare towers of powers are
        invalid.
        """
        if self.next() == "-":
            self.take()
            return _signed(self.atom(depth), -1)
        return self.atom(depth)

    def atom(self, depth: int) -> ExpressionSize:
        if depth > DEPTH:
            raise TooMuch
        token = self.take()
        if token.isdigit():
            value = Fraction(int(token)) if len(token) <= 18 else None
            return ExpressionSize(bits=len(token) * 3.33, value=value, rational=True)
        if token in CLOSING:
            return self.group(token, depth)
        if token == "\\frac":
            over, under = self.argument(depth + 1), self.argument(depth + 1)
            return _multiplied(over, _reciprocal(under))
        if token == "\\binom":
            return _binomial(self.argument(depth + 1), self.argument(depth + 1))
        if token == "\\sqrt":
            return self.root(depth)
        if token in NAMED:
            return self.function(depth)
        if token.isalpha() or (token[0] == "\\" and len(token) > 1):
            self.letters.add(token)
            return ExpressionSize(degree=1)
        raise TooMuch

    def group(self, opening: str, depth: int) -> ExpressionSize:
        outside, self.bars = self.bars, int(opening == "|")
        size = self.sum(depth + 1)
        self.take(CLOSING[opening])
        self.bars = outside
        return _signed(size, -1) if opening == "|" and size.value is not None and size.value < 0 else size

    def root(self, depth: int) -> ExpressionSize:
        self.roots += 1
        if self.next() == "[":
            self.group(self.take(), depth)
        inside = self.argument(depth + 1)
        return replace(inside, value=None, rational=False)

    def function(self, depth: int) -> ExpressionSize:
        self.functions += 1
        while self.next() in ("^", "_"):
            self.take()
            self.argument(depth)
        inside = self.factor(depth + 1)
        return replace(inside, top=1, bottom=1, value=None, rational=False, degree=1)
