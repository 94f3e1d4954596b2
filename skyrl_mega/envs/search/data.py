"""Rows for SearchR1 (arXiv:2503.09516): open questions and the passages to search, from files or built-in facts."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.command import MOST, integer, path_of
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.row import row
from skyrl_mega.envs.search import facts
from skyrl_mega.envs.search.score import normalise, targets_of

SYSTEM = "You are a helpful and harmless assistant."
INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as you want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
)
"""Wording of Search-R1 and SkyRL, so results are comparable."""

SUFFIXES = (".jsonl", ".json", ".parquet")
ANSWERS = ("golden_answers", "answers", "answer", "reward_model", "reward_spec")
"""Columns with the right answers; the first column with an answer counts."""
TEST_SHARE = 5
"""Held-out share of the facts' countries, with all questions: one country in `TEST_SHARE`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data search`."""
    parser.add_argument(
        "--source",
        type=path_of,
        help="questions with answers (NQ, HotpotQA and the like): a folder with train and test, and perhaps corpus, as "
        f"{', '.join(SUFFIXES)}, or one such file (a training set); without it, two-hop questions over facts of the "
        "project's own",
    )
    parser.add_argument("--held-out", type=path_of, help="a file of test questions")
    parser.add_argument(
        "--whole-test",
        action="store_true",
        help="keeps test questions that repeat training questions or are on their passages, as published averages do",
    )
    parser.add_argument("--corpus", type=path_of, help="a file of passages with id, title and text")
    parser.add_argument(
        "--passages",
        type=integer(1, MOST),
        help="passages at most: those that questions name first, then the corpus' order",
    )
    parser.add_argument("--limit", type=integer(1, MOST), help="rows of each split at most")
    parser.add_argument(
        "--shots",
        type=integer(0, 1000),
        default=0,
        help="worked examples from the project's own facts before each question (default: 0)",
    )


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name → rows: `train.parquet`, `test.parquet` and `corpus.parquet` (id, title and text).

    Without `--source`, questions about facts on countries; `args.seed` decides the held-out facts. With `--source`,
    files missing there are left out.

    Raises:
        UserError: An option needs `--source`, or the source is wrong; for a wrong passage, while the rows are read.
    """
    if args.source is None:
        for option in ("held_out", "whole_test", "corpus", "passages"):
            if getattr(args, option) not in (None, False):
                raise UserError(
                    "the option is for your own questions and needs --source",
                    key=f"--{option.replace('_', '-')}",
                    fix="give --source (a folder with train and test, or one file), or drop the option",
                )
        return _from_facts(args.seed, args.shots, args.limit)
    return _from_files(args)


# --- facts ---


def _from_facts(seed: int, shots: int, limit: int | None) -> dict[str, Iterator[dict[str, Any]]]:
    test, example_countries, train = _countries(seed, shots)
    earlier = _examples(example_countries)
    return {
        "train.parquet": _fact_rows(train, "train", earlier, limit),
        "test.parquet": _fact_rows(test, "test", earlier, limit),
        "corpus.parquet": (
            {"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(facts.passages().items())
        ),
    }


def _countries(seed: int, shots: int) -> tuple[list[facts.Country], ...]:
    """Returns the countries held out, shown in examples, and for training."""
    countries = facts.countries()
    shuffled = [countries[i] for i in np.random.default_rng(seed).permutation(len(countries))]
    held = len(shuffled) // TEST_SHARE
    if shots > len(shuffled) - held - 1:
        raise UserError(f"allowed: at most {len(shuffled) - held - 1}", key="--shots", value=shots)
    return shuffled[:held], shuffled[held : held + shots], shuffled[held + shots :]


def _examples(countries: list[facts.Country]) -> list[Message]:
    """Returns a worked question about each country; the kind of question rotates, so neighbours differ."""
    questions = [kinds[i % len(kinds)] for i, c in enumerate(countries) for kinds in [list(facts.questions([c]))[::-1]]]
    return [message for question in questions for message in _worked(question)]


def _fact_rows(
    countries: list[facts.Country], split: str, earlier: list[Message], limit: int | None
) -> Iterator[dict[str, Any]]:
    for index, question in enumerate(itertools.islice(facts.questions(countries), limit)):
        yield _row("facts", question.text, question.answers, split, index, titles=list(question.chain), earlier=earlier)


def _worked(question: facts.FactQuestion) -> Iterator[Message]:
    """Yields the messages of two searches and an answer, with the results of the searches."""
    corpus = facts.passages()
    first = question.chain[0]
    onward = (f"capital of {question.country}", f"river of {first}")
    queries = question.chain if first in question.text else onward
    yield {"role": "user", "content": question.text}
    for query, title in zip(queries, question.chain, strict=True):
        yield {"role": "assistant", "content": f"<search>{query}</search>"}
        yield {"role": "user", "content": f'\n<information>Doc 1(Title: "{title}") {corpus[title]}</information>\n'}
    yield {"role": "assistant", "content": f"<answer>{question.answers[0]}</answer>"}


# --- files ---


def _from_files(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    source: Path = args.source
    earlier = _examples(_countries(args.seed, args.shots)[1])
    files = {"train": source if source.is_file() else _find(source, "train")}
    files["test"] = args.held_out or (None if source.is_file() else _find(source, "test"))
    corpus = args.corpus or (None if source.is_file() else _find(source, "corpus"))
    if not files["train"] and not files["test"]:
        raise UserError(
            f"allowed: a file, or a folder with train and test as {', '.join(SUFFIXES)}", key="--source", value=source
        )
    splits = {split: list(_questions(file)) for split, file in files.items() if file}
    if "train" in splits and "test" in splits and not args.whole_test:
        splits["test"] = _without_leakage(splits["train"], splits["test"])
    splits = {split: questions[: args.limit] for split, questions in splits.items()}
    written: dict[str, Iterator[dict[str, Any]]] = {
        f"{split}.parquet": iter(
            [
                _row(q["data_source"], q["question"], q["answers"], split, i, titles=q["titles"], earlier=earlier)
                for i, q in enumerate(questions)
            ]
        )
        for split, questions in splits.items()
    }
    if corpus:
        titles = {title for questions in splits.values() for q in questions for title in q["titles"]}
        written["corpus.parquet"] = _passages(corpus, titles, args.passages)
    return written


def _find(folder: Path, name: str) -> Path | None:
    return next((f for suffix in SUFFIXES if (f := folder / f"{name}{suffix}").is_file()), None)


def _questions(file: Path) -> Iterator[dict[str, Any]]:
    for index, record in enumerate(records(file)):
        where = f"{file}, row {index}"
        if not isinstance(record, dict) or not isinstance(record.get("question"), str):
            raise UserError("allowed: a string", key=f"{where}, column question")
        yield {
            "question": record["question"],
            "answers": _answers(record, where),
            "titles": _titles(record, where),
            "data_source": str(record.get("data_source") or file.stem),
        }


def _answers(record: dict[str, Any], where: str) -> list[str]:
    for name in ANSWERS:
        value = record.get(name)
        if isinstance(value, dict):
            value = value.get("ground_truth", value)
        if answers := targets_of(value):
            return answers
    raise UserError(f"it has no answer; allowed is one of the columns {', '.join(ANSWERS)}", key=where)


def _titles(record: dict[str, Any], where: str) -> list[str]:
    """Returns the titles of the answering passages, from the formats of HotpotQA, 2Wiki and MuSiQue; [] if unknown."""
    try:
        return _supporting_titles(record)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        allowed = "as HotpotQA's, 2Wiki's or MuSiQue's"
        raise UserError(f"{where}, supporting_facts or paragraphs: allowed: {allowed}, or without them") from error


def _supporting_titles(record: dict[str, Any]) -> list[str]:
    supporting = record.get("supporting_facts")
    if isinstance(supporting, dict):  # the Hugging Face hub's form
        titles = list(supporting.get("title") or [])
    elif supporting:
        titles = [fact[0] for fact in supporting]
    else:
        titles = [p["title"] for p in record.get("paragraphs") or [] if p.get("is_gold") or p.get("is_supporting")]
    return list(dict.fromkeys(map(str, titles)))


def _without_leakage(train: list[dict[str, Any]], test: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the test questions that are no training questions and share no passage with a training question."""
    asked = {normalise(q["question"]) for q in train}
    titles = {title for q in train for title in q["titles"]}
    kept = [q for q in test if normalise(q["question"]) not in asked and titles.isdisjoint(q["titles"])]
    if len(kept) < len(test):
        print(
            f"{len(test) - len(kept)} of {len(test)} test questions are left out: they repeat a training question or "
            "are about its passages; --whole-test keeps them",
            file=sys.stderr,
        )
    return kept


def _passages(file: Path, wanted: set[str], limit: int | None) -> Iterator[dict[str, Any]]:
    """Yields the passages with wanted titles, and other passages up to `limit` in total, in the corpus' order."""

    def named() -> Iterator[tuple[bool, dict[str, Any]]]:
        for index, record in enumerate(records(file)):
            for column in ("title", "text"):
                if not isinstance(record, dict) or not isinstance(record.get(column), str):
                    raise UserError("allowed: a string", key=f"{file}, row {index}, column {column}")
            passage = {"id": str(record.get("id", index)), "title": record["title"], "text": record["text"]}
            yield record["title"] in wanted, passage

    others_left = sys.maxsize if limit is None else max(limit - sum(is_named for is_named, _ in named()), 0)
    for is_named, passage in named():
        if is_named or others_left > 0:
            others_left -= not is_named
            yield passage


def _row(
    source: str,
    question: str,
    answers: list[str] | tuple[str, ...],
    split: str,
    index: int,
    *,
    titles: list[str],
    earlier: list[Message],
) -> dict[str, Any]:
    messages = [*earlier, {"role": "user", "content": question}]
    messages[0] = {**messages[0], "content": INSTRUCTION + messages[0]["content"]}
    return row(
        data_source=f"searchR1_{source}",
        prompt=[{"role": "system", "content": SYSTEM}, *messages],
        env_class="search",
        ground_truth={"target": list(answers)},
        extra_info={"split": split, "index": index, "question": question, "titles": titles},
    )
