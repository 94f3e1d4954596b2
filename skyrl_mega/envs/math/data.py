"""Rows for mathematics: DAPO-Math-17k, AIME24, MATH and similar files, or small generated problems."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.command import MOST, integer, path_of
from skyrl_mega.envs.base import ROLES, Message
from skyrl_mega.envs.row import row

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: \\boxed{$Answer} where $Answer is the answer to the problem."
)
AFTER = 'Remember to put your answer on its own line after "Answer:".'
"""DAPO's wording, so results are comparable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data math`."""
    form = (
        "a .parquet, .json or .jsonl file with problem or question and answer, or as DAPO-Math-17k: prompt, and "
        "reward_model.ground_truth or label"
    )
    parser.add_argument("--train-file", type=path_of, help=f"{form}; without it, small problems are made")
    parser.add_argument("--test-file", type=path_of, help="such a file; its problems are left out of the training rows")
    parser.add_argument("--limit", type=integer(1, MOST), help="rows of each split at most, drawn at random")
    parser.add_argument("--longest", type=integer(1, MOST), help="characters of a training problem at most")
    parser.add_argument(
        "--shots",
        type=integer(0, 1000),
        default=0,
        help="the N shortest training problems, with their answers alone, as earlier turns before each problem; they "
        "are left out of the rows (default: 0)",
    )
    parser.add_argument(
        "--env", choices=("math", "aime"), default="math", help="aime: ±1 as DAPO; math: 0/1 by algebra (default)"
    )


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows, from `--train-file` and `--test-file`, or small
    generated problems without files; deterministic in `args.seed`. With a single file, only that split is returned.
    Problems are unique, within and across the files; problems without an answer are left out, and counted on stderr.
    Also left out are training problems longer than `--longest`, and the `--shots` shortest training problems, which
    are shown with their answers before every problem. With `--limit`, each split is a random choice of that number of
    rows.

    Raises:
        UserError: The training problems are fewer than `--shots`, or a file cannot be read or is malformed.
    """
    if args.train_file is None and args.test_file is None:
        splits = dict(zip(("train", "test"), _small(np.random.default_rng([args.seed, 1])), strict=True))
    else:
        files = {"test": args.test_file, "train": args.train_file}
        splits = {split: _problems(file) for split, file in files.items() if file is not None}
    seen_texts: set[str] = set()
    for split in ("test", "train"):
        if split in splits:
            splits[split] = _unique(splits[split], seen_texts, args.longest if split == "train" else None)
    shots = sorted(splits.get("train", []), key=lambda p: len(p[0][-1]["content"]))[: args.shots]
    if len(shots) < args.shots:
        raise UserError(
            f"the examples are taken from the training problems, and there are only {len(shots)}",
            key="--shots",
            value=args.shots,
        )
    splits = {split: [p for p in problems if p not in shots] for split, problems in splits.items()}
    rng = np.random.default_rng(args.seed)
    if args.limit is not None:
        splits = {s: [p[i] for i in rng.permutation(len(p))[: args.limit]] for s, p in splits.items()}
    return {f"{split}.parquet": _rows(problems, split, args.env, shots) for split, problems in splits.items()}


Problem = tuple[list[Message], str]
"""Messages asking the problem, and the answer."""


def dapo_prompt(problem: str) -> list[Message]:
    """Returns the messages asking a problem in DAPO's wording."""
    return [{"role": "user", "content": f"{BEFORE}\n\n{problem.strip()}\n\n{AFTER}"}]


def _problems(file: Path) -> list[Problem]:
    """Returns the problems with an answer; in published files a few rows lack the answer."""
    parsed = [_problem(record, file, index) for index, record in enumerate(records(file))]
    kept = [(messages, answer) for messages, answer in parsed if answer]
    if len(kept) < len(parsed):
        lost = len(parsed) - len(kept)
        print(f"{file}: {lost} of {len(parsed)} problems have an empty answer and are left out", file=sys.stderr)
    return kept


def _problem(record: Any, file: Path, index: int) -> Problem:
    """Returns the problem of a record, with "" for an empty answer."""
    fields = record if isinstance(record, dict) else {}
    spec = fields.get("reward_model") or fields.get("reward_spec")
    spec = spec if isinstance(spec, dict) else {}
    answers = [
        source[key] for source, key in ((fields, "answer"), (fields, "label"), (spec, "ground_truth")) if key in source
    ]
    answer = next((a for a in answers if a is not None), "")
    if not answers or not isinstance(answer, str | int):
        raise UserError(
            "it has no answer; allowed: answer, label or reward_model.ground_truth, a string",
            key=f"{file}, row {index}",
        )
    if fields.get("prompt"):
        return _messages(fields["prompt"], f"{file}, row {index}"), str(answer).strip()
    problem = fields.get("problem") or fields.get("question")
    if not isinstance(problem, str):
        raise UserError("it has no problem; allowed: problem, question or prompt", key=f"{file}, row {index}")
    return dapo_prompt(problem), str(answer).strip()


def _messages(prompt: Any, where: str) -> list[Message]:
    messages = prompt if isinstance(prompt, list) else [prompt]
    for message in messages:
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str) or message.get("role") not in ROLES:
            raise UserError(f"{where}, prompt: allowed is a list of messages, each with role and content")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _unique(problems: list[Problem], seen_texts: set[str], longest: int | None) -> list[Problem]:
    """Returns the problems with a new text of at most `longest` characters, and adds the texts to `seen_texts`."""
    kept = []
    for messages, answer in problems:
        text = messages[-1]["content"]
        key = " ".join(text.removeprefix(BEFORE).removesuffix(AFTER).split())
        if key not in seen_texts and (longest is None or len(key) <= longest):
            seen_texts.add(key)
            kept.append((messages, answer))
    return kept


def _rows(problems: list[Problem], split: str, env: str, shots: list[Problem]) -> Iterator[dict[str, Any]]:
    solved = [({"role": "assistant", "content": f"Answer: \\boxed{{{answer}}}"}, asked) for asked, answer in shots]
    examples = [message for reply, asked in solved for message in (*asked, reply)]
    for index, (messages, answer) in enumerate(problems):
        yield row(
            data_source="math",
            prompt=[*examples, *messages],
            env_class=env,
            ground_truth=answer,
            extra_info={"split": split, "index": index},
        )


def _small(rng: np.random.Generator) -> tuple[list[Problem], list[Problem]]:
    """Generates 1200 problems of six kinds; a random sixth is for testing."""

    def line(a: int, b: int, c: int) -> tuple[str, str]:
        return f"Solve ${a}x + {b} = {a * c + b}$ for $x$.", str(c)

    def fraction(a: int, b: int, c: int) -> tuple[str, str]:
        return f"What is $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{b}}}$?", f"\\frac{{{a + c}}}{{{b}}}"

    def remainder(a: int, b: int, c: int) -> tuple[str, str]:
        return f"What is the remainder when ${a * b + c}$ is divided by ${b + 1}$?", str((a * b + c) % (b + 1))

    def square(a: int, b: int, c: int) -> tuple[str, str]:
        return f"Expand $(x + {a})(x - {b}) + {c}$.", f"x^2 + ({a - b})x + ({c - a * b})"

    def root(a: int, b: int, c: int) -> tuple[str, str]:
        return f"Simplify $\\sqrt{{{a * a * b}}} + {c}$.", f"{a}\\sqrt{{{b}}} + {c}"

    def sequence(a: int, b: int, c: int) -> tuple[str, str]:
        return f"A sequence begins ${a}, {a + b}, {a + 2 * b}$. What is term number {c + 3}?", str(a + (c + 2) * b)

    kinds: list[Callable[[int, int, int], tuple[str, str]]] = [line, fraction, remainder, square, root, sequence]
    answers: dict[str, str] = {}
    for kind in itertools.islice(itertools.cycle(kinds), 3000):
        problem, answer = kind(*(int(n) for n in rng.integers(2, 20, 3)))
        answers.setdefault(problem, answer)
        if len(answers) == 1200:
            break
    problems = [(dapo_prompt(problem), answer) for problem, answer in answers.items()]
    test_indices = set(rng.permutation(len(problems))[: len(problems) // 6].tolist())
    return (
        [p for i, p in enumerate(problems) if i not in test_indices],
        [p for i, p in enumerate(problems) if i in test_indices],
    )
