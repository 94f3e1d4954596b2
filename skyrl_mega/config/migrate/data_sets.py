"""Settings for data sets known to `python -m skyrl_mega.data`, recognized by file or data set name."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.migrate.state import TranslationState

ALGEBRA = ("deepscaler", "math", "accuracy_reward", "reasoning_accuracy_reward", "hf_math_verify", "math_verify")
"""Graders of other programs with a mathematical comparison of the final answer."""
REPEATED = {
    ("data.train.dataset_name", "DAPOMath17K"): "run.epochs: NeMo-RL's file repeats each problem about 100 times, and "
    "here each is taken once (docs/math.md); give run.epochs=1000000 to let run.steps end the run",
    ("data.validation.dataset_name", "DAPOMathAIME2024"): "evaluation.samples: NeMo-RL's file has each of 30 problems "
    "32 times, and here each is taken once; give evaluation.samples=32 evaluation.limit=30",
}
"""NeMo-RL's key and its value → sentence for the user about rows that NeMo-RL reads several times."""
FILES = (
    (
        *("data.train", "train.parquet"),
        ("data.train_files", "--prompt-data", "dataset_name", "data.train.dataset_name", "data.train.data_path"),
    ),
    (
        *("data.eval", "test.parquet"),
        ("data.val_files", "--eval-prompt-data", "data.validation.dataset_name", "data.validation.data_path"),
    ),
)
"""Our setting of data files, the file that `data.prepare` writes, and the other programs' keys."""


def choose(t: TranslationState) -> None:
    """Adds settings for the given training data to the translation, in place: conversion and environment of a known
    data set.

    Rows of an unknown data set stay as they are, or become a note for the user. Without evaluation data, also turns
    evaluation off.
    """
    files = t.migration.settings.get("data.train") or []
    first = files[0] if files else ""
    known = next((add for name, add in KNOWN.items() if name in first.casefold() and t.program != "SkyRL"), None)
    if t.migration.settings.get("environment.reward_function"):
        pass  # the function judges the rows as they are
    elif known:
        _replace(t, "data.default.env_name", {}, "the rows that data.prepare writes name their environment")
        known(t, first)
    elif t.program == "TRL" and first:
        folder = f"data/{first.rpartition('/')[2]}"
        _replace(t, "dataset_name", {"data.train": [f"{folder}/train.parquet"]}, rows_text(first))
    elif t.program == "verl" and first:
        t.migration.assumptions.append(
            "the rows have env_class; else give environment.default or environment.reward_function"
        )
    if not t.migration.settings.get("data.eval"):
        _without_evaluation(t)
        t.migration.add("no evaluation data", {"evaluation.every": 0, "evaluation.before": False})


def to_write(t: TranslationState) -> list[str]:
    """Returns a sentence for each file of unknown data that the run reads, and the user must write; for each list of
    data sets, as NeMo-RL may have; and for data with repeated rows (`REPEATED`)."""
    settings = t.migration.settings
    lists = [key for key in ("data.train", "data.validation") if isinstance(t.theirs(key), list)]
    repeated = [text for (key, name), text in REPEATED.items() if t.theirs(key) == name]
    return (
        repeated
        + [f"{key}: {rows_text(f'its {len(t.theirs(key))} data sets')}" for key in lists]
        + [
            f"{settings[key][0]}: {row.why}"
            for row in t.migration.rows
            for key, value in row.ours.items()
            if row.why == rows_text(str(row.value)) and settings.get(key) == value
        ]
    )


def _without_evaluation(t: TranslationState) -> None:
    """Drops intervals of evaluation that were translated, as there is no data for them."""
    dropped = [key for key in ("evaluation.every", "evaluation.before") if t.migration.settings.get(key)]
    for key in dropped:
        value = t.migration.settings.pop(key)
        for n, row in enumerate(t.migration.rows):
            if key in row.ours:
                ours = {name: v for name, v in row.ours.items() if name != key}
                why = f"no evaluation data is known: give data.eval and {key}={shown(value)}"
                t.migration.rows[n] = replace(row, kind=row.kind if ours else "dropped", ours=ours, why=why)
    t.migration.rows = [row for row in t.migration.rows if row.kind != "dropped" or row.theirs in t.given]


def rows_text(name: str) -> str:
    """Returns the task to write the rows of an unknown data set, for the account."""
    return f"write the rows of {name} with prompt, env_class and reward_spec (docs/environments.md)"


def _math(t: TranslationState, file: str) -> None:
    """Adds the conversion of DAPO-Math-17k."""
    rewards = [*t.theirs("reward_funcs")] if isinstance(t.theirs("reward_funcs"), list) else []
    graders = {str(t.theirs(key)) for key in ("--rm-type", "env.math.math_verify_impl")} | {*map(str, rewards)}
    grader = "math" if graders & {*ALGEBRA} else "aime"
    folder = posixpath.join(posixpath.dirname(file), "skyrl_mega")
    tests = t.migration.settings.get("data.eval") or []
    arguments = ["math", "--output", "${data.folder}", "--env", grader, "--train-file", file]
    arguments += ["--test-file", tests[0]] if tests else []
    _replace_files(t, "its rows are converted by data.prepare before the run", with_tests=bool(tests))
    prepare = {"data.prepare": " ".join(arguments)}
    _replace(t, "--rm-type", prepare, f"environment {grader} grades (docs/math.md)")
    t.migration.add("data set: mathematics", {"data.folder": folder, **prepare}, "as configs/dapo.yaml")
    if grader == "aime":
        answer = {"environment.options.aime.answer": "dapo"}
        for key in ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name"):
            if t.theirs(key) == "dapo":
                _replace(t, key, answer, "environment aime grades: the last `Answer:` line alone counts, ±1")
        if t.theirs("grpo.reward_scaling.enabled") and t.theirs("grpo.reward_scaling.target_min") == -1:
            _replace(t, "grpo.reward_scaling.enabled", answer, "environment aime grades with ±1")
        t.migration.add("data set: mathematics", answer, "the last `Answer:` line alone counts, ±1, as in DAPO")


def _gsm8k(t: TranslationState, file: str) -> None:
    """Adds the download of GSM8K and its environment."""
    _replace_files(t, "the rows are downloaded and written by data.prepare before the run")
    folder = posixpath.dirname(file) if "parquet" in file else "data/gsm8k"
    settings = {"data.folder": folder, "data.prepare": "gsm8k --output ${data.folder}", "environment.default": "gsm8k"}
    t.migration.add("data set: GSM8K", settings, "as configs/gsm8k.yaml")


def _replace_files(t: TranslationState, why: str, *, with_tests: bool = True) -> None:
    """Replaces the given files of training, and with `with_tests` of evaluation, by those of `data.prepare`."""
    for setting, file, names in FILES[: 1 + with_tests]:
        for key in names:
            _replace(t, key, {setting: [f"${{data.folder}}/{file}"]}, why)


def _replace(t: TranslationState, key: str, settings: dict[str, Any], why: str) -> None:
    """Replaces the result of a given key: removes its rows and their settings, then sets `settings` with a row
    `changed`. Does nothing if the key is not given."""
    if key in t.given:
        for name in {name for row in t.migration.rows if row.theirs == key for name in row.ours}:
            t.migration.settings.pop(name, None)
        t.migration.rows = [row for row in t.migration.rows if row.theirs != key]
        for name in settings:
            t.migration.settings.pop(name, None)
        t.consume(key, "changed", settings, why)


KNOWN: dict[str, Callable[[TranslationState, str], None]] = {
    "dapo-math-17k": _math,
    "dapo_math": _math,
    "gsm8k": _gsm8k,
}
"""Part of a file or data set name → function to add the settings of this data set."""
