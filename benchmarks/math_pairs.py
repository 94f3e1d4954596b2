"""Compares the math checker with math-verify: the rates of wrong answers accepted and right answers refused.

    python -m benchmarks.math_pairs [--golds rllm_train_math.json] [--shown 20]

Uses pairs by hand (`math_pairs.tsv`), and pairs generated from a file of problems with an `answer` each: an equivalent
form, and a different answer. Equality follows from the construction, in exact arithmetic or by sympy from a separate
translation; neither the checker nor math-verify decides the truth.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import sympy
from sympy.parsing.sympy_parser import implicit_multiplication, parse_expr, standard_transformations

from skyrl_mega.envs.math.check import same


class Pair(NamedTuple):
    """Two answers."""

    gold: str
    answer: str
    same: bool
    kind: str


def by_hand() -> list[Pair]:
    """Returns the pairs of `math_pairs.tsv`."""
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return [Pair(gold, answer, truth == "same", "by hand") for truth, gold, answer in rows]


def made(golds: list[str], most: int) -> list[Pair]:
    """Returns at most `most` pairs of each kind, always the same."""
    rng = random.Random(0)
    pool = sorted(set(golds))
    rng.shuffle(pool)
    pairs: list[Pair] = []
    count: Counter[tuple[str, bool]] = Counter()
    for gold in pool:
        for pair in (*_numbers(gold), *_expressions(gold), *_parts(gold), *_letters(gold), *_equations(gold)):
            if count[pair.kind, pair.same] < most and pair.gold.strip() != pair.answer.strip():
                count[pair.kind, pair.same] += 1
                pairs.append(pair)
    return pairs


def _numbers(gold: str) -> Iterator[Pair]:
    match = re.fullmatch(r"(-?)(?:\\d?frac\{(\d+)\}\{(\d+)\}|(\d+)(?:\.(\d+))?)", gold)
    if match is None:
        return
    sign, over, under, whole, digits = match.groups()
    value = Fraction(int(over), int(under)) if over else Fraction(f"{whole}.{digits or 0}")
    value = -value if sign else value
    top, bottom = value.numerator, value.denominator
    forms = [
        f"\\frac{{{3 * top}}}{{{3 * bottom}}}",
        f"{top}/{bottom}",
        f"x = {gold}",
        f"${gold}$.",
        f"{gold}\\text{{ ways}}",
    ]
    if bottom in (2, 4, 5, 8, 10, 20, 25):
        forms += [str(float(value)), f"{float(100 * value):g}\\%"]
    for form in forms:
        yield Pair(gold, form, True, "number")
    others = [f"{top + 1}/{bottom}", f"{gold}\\%", f"{gold}a", f"{gold}, {top + 7}", f"{gold}:1", f"({gold},{gold})"]
    if value:
        others.append(f"{-top}/{bottom}")
    if abs(value) not in (0, 1):
        others.append(f"\\frac{{{bottom}}}{{{top}}}")
    if value.denominator == 1 and value >= 10:
        others.append(f"{str(top)[0]} {str(top)[1:]}")
    for other in others:
        yield Pair(gold, other, False, "number")


def _sympy(text: str) -> sympy.Expr | None:
    """Returns the sympy form of fractions, roots and powers; None for anything else."""
    plain = re.sub(r"\\[dt]frac", r"\\frac", text.replace(" ", ""))
    for _ in range(4):
        plain = re.sub(r"\\frac\{([^{}\\]*)\}\{([^{}\\]*)\}", r"((\1)/(\2))", plain)
        plain = re.sub(r"\\sqrt\{([^{}\\]*)\}", r"(sqrt(\1))", plain)
        plain = re.sub(r"\^\{([^{}\\]*)\}", r"**(\1)", plain).replace("\\pi", "(pi)")
    plain = re.sub(
        r"(?<=[\d)])(?=[a-z(])|(?<=\))(?=\w)|(?<![a-z])([xyabcn])(?=[xyabcn(])", r"\1*", plain.replace("^", "**")
    )
    if re.search(r"[\\{},=:!]|(?<![a-z])(?!sqrt|pi)[a-z]{2}", plain) or not re.search(r"[a-z]", plain):
        return None
    try:
        return parse_expr(plain, transformations=(*standard_transformations, implicit_multiplication))
    except (SyntaxError, TypeError, ValueError, AttributeError):
        return None


def _expressions(gold: str) -> Iterator[Pair]:
    value = _sympy(gold)
    if value is None or not isinstance(value, sympy.Expr):
        return
    for form in (sympy.expand(value), sympy.factor(value), sympy.together(value), sympy.nsimplify(value)):
        yield Pair(gold, sympy.latex(form), sympy.simplify(form - value) == 0, "expression")
    symbols = sorted(value.free_symbols, key=str)
    others = [value + 1, -value, 2 * value, value.subs(symbols[0], symbols[0] + 1) if symbols else value / 3]
    for other in others:
        yield Pair(gold, sympy.latex(other), sympy.simplify(other - value) == 0, "expression")


def _parts(gold: str) -> Iterator[Pair]:
    text = gold.replace("\\left", "").replace("\\right", "").strip()
    brackets = re.fullmatch(r"([(\[])([^()\[\]{}]+)([)\]])", text)
    inner = brackets.group(2) if brackets else text
    parts = [part.strip() for part in inner.split(",")]
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text):  # a long number
        return
    if len(parts) < 2 or not all(re.fullmatch(r"-?\d+", part) for part in parts):
        return
    back = ", ".join(reversed(parts))
    if brackets:
        a, b = brackets.group(1), brackets.group(3)
        yield Pair(gold, f"\\left{a} {','.join(parts)} \\right{b}", True, "pair")
        yield Pair(gold, f"{a}{'.0, '.join(parts)}.0{b}", True, "pair")
        yield Pair(gold, f"{a}{back}{b}", back == ", ".join(parts), "pair")
        yield Pair(gold, inner, False, "pair")
        yield Pair(gold, f"{'(' if a == '[' else '['}{inner}{b}", False, "pair")
        yield Pair(gold, f"{a}{parts[0]}, {int(parts[1]) + 1}{b}", False, "pair")
    else:
        yield Pair(gold, back, True, "list")
        yield Pair(gold, " \\text{ or } ".join(parts), True, "list")
        yield Pair(gold, f"x = {back}", True, "list")
        yield Pair(gold, f"({inner})", False, "list")
        yield Pair(gold, ", ".join(parts[:-1]), False, "list")
        yield Pair(gold, ", ".join([*parts, "777"]), False, "list")
        yield Pair(gold, "".join(parts), False, "list")


def _letters(gold: str) -> Iterator[Pair]:
    match = re.fullmatch(r"\\text\{\(?([A-F])\)?\}|([A-F])", gold)
    if match:
        letter = match.group(1) or match.group(2)
        for form in (letter, f"({letter})", f"\\text{{{letter}}}", f"\\textbf{{({letter})}}"):
            yield Pair(gold, form, True, "letter")
        for other in (chr(ord(letter) + 1), letter.lower(), f"{letter}, {chr(ord(letter) + 1)}", f"2{letter}"):
            yield Pair(gold, other, False, "letter")
    word = re.fullmatch(r"\\text\{([A-Za-z]{3,})\}", gold)
    if word:
        for form in (word.group(1), f"\\textbf{{{word.group(1)}}}", word.group(1).capitalize()):
            yield Pair(gold, form, True, "word")
        for other in (f"\\text{{not {word.group(1)}}}", word.group(1)[::-1], word.group(1)[0], "\\text{nothing}"):
            yield Pair(gold, other, False, "word")


def _equations(gold: str) -> Iterator[Pair]:
    left, _, right = (side.strip() for side in gold.partition("="))
    if not right or not re.fullmatch(r"[\w+\-^* {}]+", left + right):
        return
    yield Pair(gold, f"{right} = {left}", True, "equation")
    yield Pair(gold, f"{left} - 1 = {right} - 1", True, "equation")
    yield Pair(gold, f"{left} = {right} + 1", False, "equation")
    yield Pair(gold, right, len(left) == 1, "equation")
    yield Pair(gold, left, False, "equation")


def math_verify(pair: Pair) -> bool:
    """Returns math-verify's verdict, with math-verify's extraction and time limits."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{pair.gold}}}"), parse(f"\\boxed{{{pair.answer}}}")))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golds", type=Path, help="JSON: a list of problems, each with its answer")
    parser.add_argument(
        "--most", type=int, default=60, help="made pairs of each kind that are the same, and of the others"
    )
    parser.add_argument("--shown", type=int, default=10, help="pairs shown that the checker gets wrong")
    args = parser.parse_args()
    pairs = by_hand()
    if args.golds:
        pairs += made(
            [str(problem["answer"]) for problem in json.loads(args.golds.read_text(encoding="utf-8"))], args.most
        )
    rows: dict[str, Counter[str]] = {}
    wrong: list[Pair] = []
    for pair in pairs:
        row = rows.setdefault(pair.kind, Counter())
        row["same" if pair.same else "other"] += 1
        for name, verdict in (("ours", same(pair.gold, pair.answer, 20.0)), ("theirs", math_verify(pair))):
            if verdict != pair.same:
                row[f"{name} {'paid' if verdict else 'refused'}"] += 1
                wrong += [pair] if name == "ours" else []
    columns = ("other", "ours paid", "theirs paid", "same", "ours refused", "theirs refused")
    rows["all"] = sum(rows.values(), Counter())
    print(f"{'':12}" + "".join(f"{column:>16}" for column in columns))
    for kind, row in rows.items():
        print(f"{kind:12}" + "".join(f"{row[column]:16}" for column in columns))
    for pair in wrong[: args.shown]:
        print(f"{'refused' if pair.same else 'paid'}: {pair.gold!r}, {pair.answer!r}")


if __name__ == "__main__":
    main()
