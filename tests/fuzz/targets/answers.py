"""Environments that judge a text alone. The construction of a text tells the expected reward in most cases."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from skyrl_mega.envs.math import check
from tests.fuzz.judged import case_of, play
from tests.fuzz.target import Target
from tests.fuzz.words import Pieces, said, tags, without, words

HASHES = ["####", "#### ", "#### 5", "####5", "### 5", "#", "#### -", "#### ,", "#### .", "#### 1,2.3"]
BOXES = [
    "\\boxed{",
    "\\boxed{}",
    "\\boxed{5}",
    "\\boxed{{5}",
    "boxed",
    "\\boxed 5",
    "\\fbox{5}",
    "}",
    "\\boxed{\\boxed{5}}",
]
LINES = ["Answer:", "answer : 5", "Answer: \\boxed{5}", "ANSWER:\t\n", "Answer: $5$", "\n"]
END = ["<|im_end|>"]


def integer(random: Random) -> int:
    """Returns a number that no hostile text contains by accident."""
    return random.choice((-1, 1)) * random.randrange(10**6, 10**8)


def other(random: Random, number: int) -> int:
    """Returns a different number, often similar."""
    return random.choice((number + random.randrange(1, 100), -number, number * 10, number + 10**6, 0, 7))


def written(random: Random, number: int) -> str:
    """Returns a whole number as text, with or without thousands separators."""
    return random.choice((f"{number}", f"{number:,}"))


def _addition(random: Random) -> Any:
    total = abs(integer(random))
    gold = str(total)[::-1]
    match random.randrange(4):
        case 0:
            space = random.choice((" ", "\n", "\t", ""))
            return case_of(gold, [[[space, 3], [gold, 1], [space, 100]]], 1.0, 0.0, 1.0)
        case 1:
            wrong = random.choice(
                (str(other(random, total)), f"{gold}.", f"={gold}", gold[:-1], f"{gold} {gold}", gold + "\0")
            )
            return case_of(gold, [[[wrong, 1]]], 0.0, 0.0, 1.0)
        case _:
            return case_of(gold, [words(random)], 0.0, 0.0, 1.0)


def _hashed(random: Random, gold: int) -> tuple[Pieces, float | None]:
    """Returns an answer for GSM8K and its score: 1 if right, 0 if wrong, None if the text holds no answer."""
    before = [*without(random, ["####"]), ["\n", 1]]
    after = [
        [random.choice((" ", "\n", "\n#### 5", " dollars", "!", "\0", "")), 1],
        *([] if random.random() < 0.5 else [["\n", 1], *words(random, HASHES)]),
    ]
    if (len(after) == 1 and after[0][0] == "") or after[0][0] == "":
        after = [["\n", 1], *after]
    match random.randrange(3):
        case 0:
            return [*before, [f"#### {written(random, gold)}", 1], *after], 1.0
        case 1:
            later = [[f"\n#### {gold}", random.choice((0, 1, 50))]]
            return [*before, [f"#### {written(random, other(random, gold))}", 1], *after, *later], 0.0
        case _:
            spot = random.choice(
                (
                    f"####{gold}",
                    f"### {gold}",
                    f"#### ${gold}",
                    f"#### x {gold}",
                    f"{gold}",
                    f"####\n{gold}",
                    f"####  {gold}",
                    f"# ### {gold}",
                )
            )
            return [*before, [spot, 1], *without(random, ["####"])], None


def _gsm8k(random: Random) -> Any:
    gold = integer(random)
    if random.random() < 0.4:
        return case_of(str(gold), [words(random, HASHES)], 0.0, 0.0, 1.0)
    text, right = _hashed(random, gold)
    return case_of(str(gold), [text], right or 0.0, 0.0, 1.0)


def _gsm8k_multi_turn(random: Random) -> Any:
    gold, turns = integer(random), random.randrange(1, 6)
    if random.random() < 0.3:
        return case_of(str(gold), [words(random, HASHES) for _ in range(turns)], None, 0.0, 0.2, turns=turns)
    texts, earned = [], 0.0
    while len(texts) < turns:
        text, right = _hashed(random, gold)
        texts.append(text)
        earned += {1.0: 1.0, 0.0: 0.2 / turns, None: 0.0}[right]
        if right:
            break
    return case_of(str(gold), texts, earned, 0.0, 1.2, turns=turns)


def _multiply(random: Random) -> Any:
    gold, turns = integer(random), random.randrange(1, 4)
    discount = random.choice((1.0, 0.5, 0.9))
    case = partial(case_of, str(gold), low=0.0, high=1.0, turns=turns, options={"discount": discount})
    if random.random() < 0.4:
        return case(say=[words(random, BOXES) for _ in range(turns)], reward=0.0)
    texts: list[Pieces] = []
    for turn in range(turns):
        before = without(random, ["\\boxed{"], BOXES[4:8])
        if random.random() < 0.4:
            space = random.choice(("", " ", "\n"))
            empty = random.choice(("", "\\boxed{}"))
            texts.append([*before, [f" {empty}\\boxed{{{space}{gold}{space}}}", 1], *words(random, BOXES)])
            return case(say=texts, reward=discount**turn)
        wrong = random.choice(
            (
                f"\\boxed{{{other(random, gold)}}}\\boxed{{{gold}}}",
                f"{gold}",
                f"\\boxed {gold}",
                f"\\boxed{{{gold}",
                f"\\boxed{{{gold}.0}}",
                f"\\boxed{{x={gold}}}",
            )
        )
        texts.append([*before, [f" {wrong}", 1]])
    return case(say=texts, reward=0.0)


def _same(random: Random, algebra: bool) -> tuple[str, list[str], list[str]]:
    """Returns a right answer, equal answers by docs/math.md, and different answers."""
    n, k = integer(random), random.randrange(2, 9)
    match random.randrange(6 if algebra else 4):
        case 0 | 1:
            return (
                str(n),
                [f"{n}", f"{n:,}", f"{n}.0", f"\\frac{{{n * k}}}{{{k}}}", f"{n * k}/{k}", f"${n}$", f" {n} "],
                [
                    f"{n + k}",
                    f"{-n}",
                    f"{n}.5",
                    f"{n}/{k}",
                    f"{n}{k}",
                    f"{str(n)[:-1]}",
                    f"{n},{k}",
                    f"({n})({k})",
                    f"{n}, {n}",
                    f"{n}\\%",
                    f"{n} \\text{{ or }} {n + 1}",
                ],
            )
        case 2:
            p, q = random.randrange(10**6, 10**7) * 2 + 1, random.choice((2, 4, 8))
            return (
                f"\\frac{{{p}}}{{{q}}}",
                [f"{p}/{q}", f"\\dfrac{{{p}}}{{{q}}}", f"\\frac{{{k * p}}}{{{k * q}}}", str(p / q)],
                [f"{q}/{p}", f"{p + q}/{q}", f"-{p}/{q}", f"{p}:{q}", str(round(p / q)), f"{p}{q}"],
            )
        case 3:
            return (
                f"({n}, {k})",
                [f"({n},{k})", f"\\left({n}, {k}\\right)"],
                [f"({k}, {n})", f"[{n}, {k}]", f"{n}, {k}", f"({n}, {k + 1})", f"({n}, {k}, {k})", f"\\{{{n}, {k}\\}}"],
            )
        case 4:
            a, b = random.randrange(100, 9999), random.choice((2, 3, 5, 7))
            return (
                f"{a}\\sqrt{{{b}}}",
                [f"\\sqrt{{{a * a * b}}}", f"\\sqrt{{{b}}} \\cdot {a}"],
                [
                    f"{a + 1}\\sqrt{{{b}}}",
                    f"{a}\\sqrt{{{b + 4}}}",
                    f"{a * b**0.5:.3f}",
                    f"-{a}\\sqrt{{{b}}}",
                    f"{a}{b}",
                ],
            )
        case _:
            a, b = random.randrange(10, 999), random.randrange(10, 999)
            return (
                f"x^2 + {a + b}x + {a * b}",
                [f"(x + {a})(x + {b})", f"{a * b} + x^2 + {a + b}x"],
                [
                    f"(x + {a})(x - {b})",
                    f"x^2 + {a + b}x",
                    f"x^2 + {a + b}y + {a * b}",
                    f"x^2 + {a + b}x + {a * b + 1}",
                ],
            )


def _math(random: Random, algebra: bool) -> Any:
    none = 0.0 if algebra else -1.0
    gold, same, wrong = _same(random, algebra)
    case = partial(case_of, gold, low=none, high=1.0)
    if random.random() < 0.35:
        return case([words(random, [*BOXES, *LINES, *END])], none)
    forbidden = ["boxed", "answer", *END]
    before, after = without(random, forbidden), without(random, forbidden, most=60)
    form = random.choice(("\\boxed{{{}}}", "\n\\boxed{{{}}}.\n", "\nAnswer: {}\n", "\nanswer: \\boxed{{{}}}\n"))
    match random.randrange(3):
        case 0:
            decoy = [[form.format(random.choice(wrong)), random.choice((0, 1, 3))]]
            return case(
                [
                    [
                        *before,
                        *decoy,
                        [" ", 1],
                        [form.format(random.choice(same)), 1],
                        *after,
                        ["<|im_end|>\\boxed{0}", random.randrange(2)],
                    ]
                ],
                1.0,
            )
        case 1:
            decoy = [[form.format(gold), random.choice((0, 1, 3))]]
            return case([[*before, *decoy, [" ", 1], [form.format(random.choice(wrong)), 1], *after]], none)
        case _:
            spot = random.choice(
                (
                    gold,
                    f"boxed{{{gold}}}",
                    f"\\boxed{gold}",
                    form.format(gold) + " " * 301,
                    f"<|im_end|>{form.format(gold)}",
                    "\\boxed{}",
                )
            )
            return case([[*before, ["\n", 1], [spot, 1], ["\n", 1], *after]], none)


ACTIONS = [
    *tags("action"),
    *(f"<action>{n}</action>" for n in (-1, 0, 1, 5, 9, 10, "1.0", "٣", " 4\n", "9" * 20, "\0")),
]


def _gym(random: Random) -> Any:
    from tests.envs.gym.own_gym import Guess

    seed, free = random.randrange(10**6), random.random() < 0.2
    if free:
        text = random.choice(("abc", "x", "", "a" * 11, "é", "1 2"))
        legal = text in ("abc", "x")  # letters and digits, ten at most
        say = [*words(random), [f"<action>{text}</action>", 1]]
        options = {"id": "tests/Echo-v0", "module": "tests.envs.gym.own_gym", "invalid_ends": True}
        say = [*without(random, ["<action>"]), say[-1]]
        return case_of(
            None, [say], float(len(text)) if legal else 0.0, 0.0, 10.0, options=options, extra_info={"seed": seed}
        )
    options = {"id": "tests/Guess-v0", "module": "tests.envs.gym.own_gym", "invalid_reward": -0.5, "invalid_ends": True}
    game = Guess()
    game.reset(seed=seed)
    texts, earned = [], 0.0
    for _ in range(3):
        move = random.choice((game.number, *range(-1, 12)))
        texts.append([*words(random, ACTIONS), [f"\n<action> {move} </action>", 1], *without(random, ["<action>"])])
        if said(texts[-1]).count("<action>") > 1:  # an earlier tag may extend over this answer
            return case_of(None, texts, None, -1.5, 1.0, turns=4, options=options, extra_info={"seed": seed})
        if not 1 <= move <= 9:
            return case_of(None, texts, earned - 0.5, -1.5, 1.0, turns=4, options=options, extra_info={"seed": seed})
        earned += 1.0 if move == game.number else -0.1
        if move == game.number:
            break
    return case_of(None, texts, earned, -1.5, 1.0, turns=4, options=options, extra_info={"seed": seed})


def _prepare_math() -> None:
    check.algebra("\\sqrt{8}", "2\\sqrt{2}", 60.0)  # the workers live as long as this process


def _target(name: str, make: Any, prepare: Any = None) -> Target:
    def run(case: Any, folder: Any) -> None:
        play(name, case)

    return Target(make, run, errors=(), **({"prepare": prepare} if prepare else {}))


TARGETS = {
    "addition": _target("addition", _addition),
    "gsm8k": _target("gsm8k", _gsm8k),
    "gsm8k_multi_turn": _target("gsm8k_multi_turn", _gsm8k_multi_turn),
    "multiply": _target("multiply", _multiply),
    "math": _target("math", partial(_math, algebra=True), _prepare_math),
    "aime": _target("aime", partial(_math, algebra=False)),
    "gym": _target("gym", _gym),
}
