"""Unfinished answers in finished form, and answers with slow algebra."""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import make
from skyrl_mega.envs.math import cost
from skyrl_mega.envs.math.answer import extract
from skyrl_mega.envs.math.check import _process_pools, algebra, same
from tests.support.machine import within

ASKED = [
    # question, gold, answer, True if right
    (r"Compute $3+4\cdot 5$.", "23", r"3+4\cdot 5", False),
    (r"Compute $3+4\cdot 5$.", "23", "3+4*5", False),
    (r"Compute $3+4\cdot 5$.", "23", r"5\cdot 4+3+0", False),
    (r"Compute $3+4\cdot 5$.", "23", "23", True),
    (r"Compute $3+4\cdot 5$.", "23", "23.0", True),
    (r"Compute $2^{10}$.", "1024", "2^{10}", False),
    (r"Compute $2^{10}$.", "1024", "(2)^{10}", False),
    ("How many subsets?", "1024", "2^{10}", True),
    ("How many subsets?", "1024", r"2^{9}\cdot 2", False),
    ("How many subsets?", "1024", "2^{9+1}", False),
    (r"Find $\binom{19}{9}$.", "92378", r"\dbinom{19}{9}", False),
    ("In how many ways?", "10", r"\binom52", True),
    ("In how many ways?", "120", "5!", True),
    (r"Evaluate $\log_2 8$.", "3", r"\log_2(8)", False),
    (r"Evaluate $\sqrt{16}$.", "4", r"\sqrt{16}", False),
    ("How long is it?", "4", r"\sqrt{16}", True),
    ("What is left?", "0", "x-x", False),
    ("What is it?", "1", r"\frac{1+2}{3}", False),
    (r"Simplify $3\sqrt2+14\sqrt2$.", r"17\sqrt2", r"14\sqrt2+3\sqrt2", False),
    ("How long is it?", r"17\sqrt2", r"3\sqrt2+14\sqrt2", False),
    (r"Simplify $\sqrt{8}$.", r"2\sqrt{2}", r"\sqrt{8}", False),
    ("How long is it?", r"2\sqrt{2}", r"\sqrt{8}", True),
    ("What is the area?", r"100-25\pi", r"25(4-\pi)", True),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "(x+1)^2", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "(1+x)^{2}", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", "1+2x+x^2", True),
    ("Find $f$.", "x^2+2x+1", "(x+1)^2", True),
    ("Factor $t^2-49$.", "(t-7)(t+7)", "t^2-49", False),
    ("Factor $t^2-49$.", "(t-7)(t+7)", "(t+7)(t-7)", True),
    ("Factor: 6x^2 - 4x", "2x(3x-2)", "6x^2-4x", False),
    (r"Simplify $\frac{6}{8}$.", r"\frac34", "6/8", False),
    (r"Simplify $\frac{6}{8}$.", r"\frac34", r"\frac{3}{4}", True),
    ("What is the chance?", r"\frac34", "6/8", True),
    (r"Write $0.\overline{3}$ as a fraction.", r"\frac13", r"0.\overline{3}", False),
    ("What is the chance?", r"\frac13", r"0.333\ldots", True),
    ("Of 0.5 and 0.7, which is smaller?", r"\frac{1}{2}", "0.5", True),
    (r"Half is $\frac{1}{2}$. What is the chance?", "0.5", r"\frac{1}{2}", True),
    ("If $x=2$ and $y=1$, what is $2x-3y$?", "1", "1", True),
    ("Which is larger, $2+3i$ or $1$?", "2+3i", "3i+2", True),
    ("A line is $2x-y+3=0$. Its slope-intercept form?", "y=2x+3", "2x-y+3=0", False),
    ("A line is $2x-y+3=0$. Its slope-intercept form?", "y=2x+3", "2x+3", True),
    ("The pair $(3+4, 2)$ is", "(7,2)", "(3+4,2)", False),
    # the form of gold does not depend on brackets and fraction bars
    ("Let $f(x)=(x+1)/(x-1)$. Find the inverse of $f$.", r"\frac{x+1}{x-1}", "(x+1)/(x-1)", True),
    ("Let $f(x)=(x+1)/(x-1)$. Find the inverse of $f$.", r"\frac{x+1}{x-1}", r"\dfrac{(x+1)}{\left(x-1\right)}", True),
    ("Let $f(x)=(x+1)/(x-1)$. Find the inverse of $f$.", r"\frac{x+1}{x-1}", "(x-1)/(x+1)", False),
    ("Choose: (n-1)/2, n/2 or (n+1)/2", r"\frac{n-1}{2}", "(n-1)/2", True),
    ("Choose: (n-1)/2, n/2 or (n+1)/2", r"\frac{n-1}{2}", "n/2", False),
    (r"Which is larger, $\sqrt{ab}$ or $(a+b)/2$?", r"\frac{a+b}{2}", "(a+b)/2", True),
    ("Simplify $(x^2-1)/(x-1)$.", "x+1", "(x^2-1)/(x-1)", False),
    ("Simplify $(x^2-1)/(x-1)$.", "x+1", r"\frac{x^2-1}{x-1}", False),
    (r"Simplify $\frac{4}{3x^{-3}}\cdot\frac{3x^{2}}{2}$.", "2x^5", r"\frac{4}{3x^{-3}}\cdot\frac{3x^{2}}{2}", False),
    ("If $A=2+i$, $P=-i$ and $S=2+4i$, find $A-P+S+4$.", "8+4i", "4(i+2)", True),
    # a value given by the question, and a value to find
    (
        r"If $\sin x = \frac{1}{\sqrt{2}}$ and x is acute, what is $\cos x$?",
        r"\frac{\sqrt2}{2}",
        r"\frac{1}{\sqrt2}",
        True,
    ),
    (r"What is $\cos x$ if $\sin x = \frac{1}{\sqrt{2}}$?", r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}", True),
    (r"Rationalize the denominator of $\frac{1}{\sqrt{2}}$.", r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt2}", False),
    (r"One leg is $\sqrt{12}$ and the triangle isosceles. Find the other leg.", r"2\sqrt3", r"\sqrt{12}", True),
    (r"Write $\sqrt{12}$ in simplest form.", r"2\sqrt3", r"\sqrt{12}", False),
    ("What is the value of $2^3$?", "8", "2^3", False),
    (
        r"What fraction, reduced to its lowest terms, is equivalent to $.\overline{25}$?",
        r"\frac{25}{99}",
        r".\overline{25}",
        False,
    ),
    ("Of $6/8$ of the balls, what is the part?", r"\frac34", "6/8", True),
    # factors
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "x^2-2x-3x+6", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "x^2-5x+6+0x", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "x^2-(5x-6)", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "x^2-5x+7-1", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "x(x-5)+6", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "1(x^2-5x+6)", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", "(3-x)(2-x)", True),
    ("Factor $x^2+2x+1$.", "(x+1)^2", "(x+1)(x+1)", True),
    ("Factor $x^2+2x+1$.", "(x+1)(x+1)", "(x+1)^{2}", True),
    ("Simplify $2(x^2+1)-1$.", "2x^2+1", "2x^2+1+0x", True),
    ("Simplify $x^2+x^2+1$.", "2x^2+1", "x^2+x^2+1+0x", False),
    ("The expression can be factored into $(a-b)p$. Find $p$.", "-(ab+ac+bc)", "-ab-ac-bc", True),
    ("How many are there?", "n(n+1)", "n^2+n", True),
]


@pytest.mark.parametrize("question, gold, answer, right", ASKED)
def test_what_is_left_to_be_worked_out(question: str, gold: str, answer: str, right: bool) -> None:
    assert same(gold, answer, 20, question) is right


def test_a_copied_question_earns_nothing() -> None:
    env = make("math", {"reward_spec": {"ground_truth": "2x^2-4x-6"}}, EnvironmentConfig())
    env.init([{"role": "user", "content": "Expand $2(x-3)(x+1)$."}])
    assert env.step(r"\boxed{2(x-3)(x+1)}")["reward"] == 0
    assert env.step(r"\boxed{2x^2-4x-6}")["reward"] == 1


@pytest.mark.parametrize(
    "text, answer",
    [
        ("**Answer:** 5", "5"),
        ("**Answer: 5**", "5"),
        ("**Final Answer**: 5", "5"),
        (r"so \boxed {5}", "5"),
        (r"so \fbox{5}", "5"),
        (r"**Answer:** \boxed {\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {3} then \boxed{4", None),
    ],
)
def test_where_else_an_answer_is(text: str, answer: str | None) -> None:
    assert extract(text, "either") == answer


TOO_MUCH = [
    r"\binom{10^9}{10^8}", "(x+y+z+w)^{40}", "2^{2^{100}}", "2^{2^{17}}", "((((2^9)^9)^9)^9)^9", "x^{2^{2^{9}}}",
    r"\binom{2^{40}}{2^{20}}", "(1000!)^{100}", r"1000!\cdot999!\cdot998!\cdot997!\cdot996!\cdot995!",
    r"\frac{1}{(x+y+z)^{60}}", "(a+b)(c+d)(e+f)(g+h)(k+l)(m+n)(p+q)", "2^{-99999}", "(2^{99})^{999}", "2^{n-n+10^{9}}",
    r"9^{(10^{20})^{1/2}}", r"2^{\frac{1000000}{1000001-1000000}}", "(n-n+100000)!", r"2^{\binom{n-n+50}{25}}",
    r"2^{(n-n+20)!}", "x^{9^9}", r"\sqrt{\sqrt{\sqrt{\sqrt{\sqrt{\sqrt{\sqrt{\sqrt{\sqrt{x}}}}}}}}}", "(x+y", "x^2^3",
    "+".join(rf"\sqrt{{{n}}}" for n in range(2, 12)), "+".join(rf"\sin({n}x)" for n in range(2, 12)),
]  # fmt: skip


@pytest.mark.parametrize("text", TOO_MUCH)
def test_more_that_is_never_asked(text: str) -> None:
    assert cost.too_expensive(text)


@pytest.mark.parametrize(
    "text",
    ["|x-|y||", r"\sqrt[3]{x+1}", r"\sin^2x", r"\log_2 8", "x_1+x_2", "120a^10", r"\binom{n}{2}", "e^{-x^2}",
     r"2\cdot-3", "(x^2+5x+2)(x^2+5x+9)", r"\frac{n(n+1)(2n+1)}{6}", "x^{-2}", "2^{1000}-1", "(3!)!",
     r"\frac{2}{\cos x}", "(2n)!", r"\binom{10^9}{2}", "(x+1)^{50}", "x^{2023}", r"\sqrt{2+\sqrt{3}}"],
)  # fmt: skip
def test_more_that_is_asked(text: str) -> None:
    assert not cost.too_expensive(text)


def test_the_look_at_a_text_is_quick_and_never_fails() -> None:
    """Inspects random texts of maximum length over the alphabet of expressions."""
    rng = random.Random(0)
    pieces = [
        *"0123456789abcxyz+-*/^_(){}[]|!.' ",
        r"\frac",
        r"\sqrt",
        r"\binom",
        r"\sin",
        r"\cdot",
        "^{",
        "^{9^{",
        "!)",
        "((",
    ]
    start = time.process_time()
    for _ in range(300):
        cost.too_expensive("".join(rng.choices(pieces, k=250)))
    for opening in ("(", "{", "9^{", r"\sqrt{", r"\frac{1}{", "2(", "|", r"\sin "):
        cost.too_expensive(opening * 250)
    assert within(time.process_time() - start, 5)


SLOW = functools.reduce(lambda inner, letter: f"{letter}+\\frac{{1}}{{{inner}}}", "yanwbzcmxy", "x")
"""A continued fraction of nine letters."""


def test_a_slow_answer_holds_up_only_its_like() -> None:
    """Checks several slow answers: quick answers continue elsewhere, and workers are interrupted instead of killed."""
    assert algebra(r"\sqrt{8}", r"2\sqrt{2}", 30)[0]  # starts a worker
    quick, _ = _process_pools()
    before = {worker.process.pid for worker in quick.queue if worker.process}
    threads = [threading.Thread(target=algebra, args=(SLOW, "1", 2.0)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert algebra(r"\sqrt{12}", r"2\sqrt{3}", 30)[0]
    assert any(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(60)
    assert before <= {worker.process.pid for worker in quick.queue if worker.process}
