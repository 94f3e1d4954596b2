"""Rows for GSM8K (arXiv:2110.14168), from the Hugging Face hub or from local files."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.command import MOST, integer, path_of
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.gsm8k.env import strict_answer
from skyrl_mega.envs.row import row

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""Suffix of each question; the wording of SkyRL and verl, so results are comparable."""

SPLITS = ("train", "test")
SUFFIXES = (".jsonl", ".json", ".parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data gsm8k`."""
    parser.add_argument(
        "--source",
        type=path_of,
        help="a folder with train and test as .jsonl, .json or .parquet, or one such file (a training set unless it "
        "is called test); without it, openai/gsm8k is read from the Hugging Face hub",
    )
    parser.add_argument("--limit", type=integer(1, MOST), help="rows of each split at most")
    parser.add_argument(
        "--shots",
        type=integer(0, 1000),
        default=0,
        help="the N shortest training questions, with their solutions, as earlier turns before each question; "
        "they are left out of the rows (default: 0)",
    )


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows, from `args.source` or Hugging Face's hub, which is
    downloaded. Splits missing in the source are left out. The order is the source's, independent of `args.seed`.

    Raises:
        UserError: The source cannot be read, or `--shots` lacks training questions. While the rows are read: a row is
            malformed.
    """
    files = _from_hub() if args.source is None else _from_disk(args.source)
    shots = _shots(files, args.shots)
    return {f"{split}.parquet": _rows(file, split, args.limit, shots) for split, file in files.items()}


def _from_hub() -> dict[str, Path]:
    from huggingface_hub import hf_hub_download

    try:
        return {
            split: Path(hf_hub_download("openai/gsm8k", f"main/{split}-00000-of-00001.parquet", repo_type="dataset"))
            for split in SPLITS
        }
    except Exception as error:  # the client raises many types for an unreachable hub
        reason = " ".join(str(error).split()).split(". ")[0]
        raise UserError(
            f"openai/gsm8k cannot be read from the Hugging Face hub ({type(error).__name__}: {reason})",
            fix="give local files with --source",
        ) from error


def _from_disk(source: Path) -> dict[str, Path]:
    if source.is_file():
        return {"test" if source.stem == "test" else "train": source}
    files = {s: f for s in SPLITS for suffix in SUFFIXES if (f := source / f"{s}{suffix}").is_file()}
    if not files:
        raise UserError(
            f"allowed: a file, or a folder with train and test as {', '.join(SUFFIXES)}", key="--source", value=source
        )
    return files


def _shots(files: dict[str, Path], count: int) -> list[dict[str, str]]:
    """Returns the `count` shortest training records, without calculator notes such as `<<1+1=2>>`."""
    if not count:
        return []
    if "train" not in files:
        raise UserError(
            "the examples are taken from a training set, and the source has none",
            key="--shots",
            value=count,
            fix="give a --source with train",
        )
    without_notes = [
        record | {"answer": re.sub(r"<<.*?>>", "", record["answer"])} for _, record, _ in _checked(files["train"])
    ]
    return sorted(without_notes, key=lambda record: len(record["question"]) + len(record["answer"]))[:count]


def _rows(file: Path, split: str, limit: int | None, shots: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    examples = [message for shot in shots for message in (_asked(shot["question"]), _answered(shot["answer"]))]
    shot_questions = {shot["question"] for shot in shots}
    kept = (checked for checked in _checked(file) if checked[1]["question"] not in shot_questions)
    for index, record, ground_truth in itertools.islice(kept, limit):
        yield row(
            data_source="openai/gsm8k",
            prompt=[*examples, _asked(record["question"])],
            env_class="gsm8k",
            ground_truth=ground_truth,
            extra_info={"split": split, "index": index, "question": record["question"], "answer": record["answer"]},
        )


def _asked(question: str) -> Message:
    return {"role": "user", "content": f"{question} {INSTRUCTION}"}


def _answered(answer: str) -> Message:
    return {"role": "assistant", "content": answer}


def _checked(file: Path) -> Iterator[tuple[int, dict[str, str], str]]:
    """Yields index, record and ground truth of each row.

    Raises:
        UserError: A row is malformed; the first such row is named.
    """
    for index, record in enumerate(records(file)):
        for column in ("question", "answer"):
            if not isinstance(record, dict) or not isinstance(record.get(column), str):
                raise UserError("allowed: a string", key=f"{file}, row {index}, column {column}")
        ground_truth = strict_answer(record["answer"])
        if ground_truth is None:
            raise UserError("it must end in '#### number'", key=f"{file}, row {index}, column answer")
        yield index, record, ground_truth
