"""Texts of a policy: pieces with repeat counts, so that a long case stays short in a file."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

Pieces = list[list]
"""Pieces of text as `[[text, times], …]`."""

CHARACTERS = [
    "\0",
    "\x1b[2J",
    "\r",
    "\x7f",
    "\u202e",
    "\ufeff",
    "\u2028",
    "\u0301",
    "\ud800",
    "\udfff",
    "\ufdd0",
    "\U0001f600",
    "\u200d",
    "\xa0",
]
NUMBERS = [
    "0",
    "-0",
    "00",
    "7",
    "-12",
    "+3",
    "1,000",
    "1,00,0",
    "3.",
    ".5",
    "1e5",
    "1e999",
    "-1e-999",
    "NaN",
    "inf",
    "0x1f",
    "1_0",
    "٣",
    "１２",
    "²",
    "½",
    "10^100",
    "50\\%",
    "1/0",
    "0/0",
    "22/7",
]
DEEP = [
    "(",
    "[",
    "{",
    "\\frac{",
    "\\sqrt{",
    "\\left(",
    "^{",
    "_{",
    "\\text{",
    "9^{",
    "2^",
    "-",
    "--",
    "!",
    "'",
    '"',
    "<",
    "((",
    "{{",
    "$",
    "\\",
    "\\begin{matrix}",
    "not ",
    "x=",
    "<b>",
]
LATEX = [
    "9^{9^{9^9}}",
    "99999!",
    "10^{10^{10}}",
    "\\binom{10^9}{5}",
    "\\frac{1}{0}",
    "\\sqrt[0]{2}",
    "\\int_0^\\infty e^{-x^2}dx",
    "\\sum_{n=1}^{\\infty}\\frac1{n^2}",
]
LATEX += [
    "\\frac12",
    "\\frac{}{}",
    "\\overline{3}",
    "0.\\overline{142857}",
    "\\begin{pmatrix}1&2\\\\3",
    "(1,2]",
    "\\{1,2,\\ldots\\}",
    "x^2+y^2=r^2",
    "\\pm 1",
    "30^\\circ",
    "x\\in\\mathbb{R}",
    "1{,}000",
    "\\text{A}",
    "\\lim_{x\\to0}x",
    "i^i",
    "\\log_2 8",
    "((1,2),(3,4))",
    "1:2:3",
    "\\infty-\\infty",
    "7\\pmod{9}",
    "101_2",
]
PROSE = [
    "So the answer is ",
    "let me think\n",
    "a b c ",
    "\n",
    " ",
    "\t",
    "Answer",
    "answer: ",
    "The final answer is",
    "```python\n",
    "```",
    "print(1)\n",
    "SELECT 1",
    "--",
    "/*",
    ";",
    "<!--",
    "<![CDATA[",
    "&lt;",
    "%s%n",
    "{0}",
    "{{7*7}}",
    "<|im_end|>",
    "<|endoftext|>",
    "<eos>",
    "</s>",
    "[INST]",
    "a" * 40 + "!",
]
TIMES = (1, 1, 1, 1, 1, 2, 3, 20, 300, 5000)
LONGEST = 400_000


def said(pieces: Pieces) -> str:
    """Returns the text of the pieces."""
    return "".join(text * times for text, times in pieces)


def words(random: Random, marks: Sequence[str] = ()) -> Pieces:
    """Returns random text; `marks` are the reader's markers: tags, beginnings of an answer."""
    pieces: Pieces = []
    for _ in range(random.choice((0, 1, 2, 5, 12, 30))):
        kind = random.choice((CHARACTERS, NUMBERS, DEEP, LATEX, PROSE, *[marks] * (3 * bool(marks))))
        text = random.choice(kind)
        if random.random() < 0.1:  # damages the piece
            at = random.randrange(len(text) + 1)
            text = random.choice(
                (text[:at], text[at:], text[:at] + random.choice(CHARACTERS) + text[at:], text.upper())
            )
        times = random.choice(TIMES)
        if text and sum(len(t) * n for t, n in pieces) + len(text) * times <= LONGEST:
            pieces.append([text, times])
    return pieces


def without(random: Random, forbidden: Sequence[str], marks: Sequence[str] = (), most: int = LONGEST) -> Pieces:
    """Returns random text of at most `most` characters without the forbidden words, ignoring case."""
    for _ in range(20):
        pieces = words(random, marks)
        text = said(pieces).lower()
        if len(text) <= most and not any(one.lower() in text for one in forbidden):
            return pieces
    return [["so ", 1]]


def tags(*names: str) -> list[str]:
    """Returns complete, partial and nearly right tags of these names."""
    forms = ("<{}>", "</{}>", "<{}>x</{}>", "<{}/>", "< {}>", "<{}", "{}>", "<{} a='b'>", "</ {}>", "<{}></{}>")
    return [form.format(name, name) for name in names for form in forms]
