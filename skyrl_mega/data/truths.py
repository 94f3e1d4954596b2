"""Rows whose reward no answer can earn: counted, reported with the first such row, and refused if too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry
from skyrl_mega.envs.truths import SPECS, spec_of

MOST_WRONG = 0.05
"""Largest allowed share of wrong rows in the files of a setting."""
ALLOWED_SPEC = "allowed is a struct with ground_truth, or JSON text of one"


@dataclass
class WrongRows:
    """Counter of the rows in a setting's files whose reward no answer can earn."""

    key: str
    """Setting that names the files."""
    rows: int = 0
    """Number of rows checked."""
    count: int = 0
    """Number of wrong rows."""
    first: str = ""
    """File, row, column and reason of the first wrong row."""

    def check(
        self,
        rows: Sequence[dict[str, Any]],
        names: Sequence[str],
        file: str | Path,
        first: int,
        config: EnvironmentConfig,
    ) -> None:
        """Checks each row with its environment, and adds to the counts of rows and of wrong rows; raises no error for a
        wrong row.

        Args:
            rows: Rows returned by `judged_rows`.
            names: Environment of each row.
            file: File of the rows.
            first: Number of the first of `rows` in the file, counted from 0.
            config: Names and options of environments.

        Raises:
            UserError: An environment is unknown or cannot be imported, or has an invalid option.
        """
        checks = {name: registry.row_check(name, config) for name in set(names)}
        self.rows += len(rows)
        for at, (row, name) in enumerate(zip(rows, names, strict=True)):
            check = checks[name]
            if check and (reason := check(row)):
                self.count += 1
                self.first = self.first or f"{file}, row {first + at}, {reason}"

    def summary(self) -> str | None:
        """Returns a line with number and share of the wrong rows and the first of them; None without wrong rows."""
        if not self.count:
            return None
        share = f"{self.count} of {self.rows} rows ({100 * self.count / self.rows:.3g} %)"
        return f"{self.key}: no answer can earn the reward of {share}; the first: {self.first}"

    def refuse(self) -> None:
        """Raises an error if too many of the rows checked so far are wrong.

        Raises:
            UserError: The share of wrong rows exceeds `MOST_WRONG`.
        """
        if self.count > MOST_WRONG * self.rows:
            raise UserError(
                self.summary(),
                fix=f"correct these rows or leave them out: at most {MOST_WRONG:.0%} of the rows may be wrong",
            )


def judged_rows(
    batch: pa.RecordBatch, names: Sequence[str], first: int, where: str, config: EnvironmentConfig
) -> list[dict[str, Any]]:
    """Returns the rows as dicts without their prompts, after checking that a ground truth is in every row whose
    environment needs one. Columns with a ground truth as JSON text are parsed.

    Args:
        batch: The rows.
        names: Environment of each row.
        first: Number of the first of the rows in the file, counted from 0.
        where: Setting and file, for errors.
        config: Names of environments.

    Raises:
        UserError: A ground truth is missing or malformed, or an environment is unknown or cannot be imported.
    """
    kinds = {name: registry.resolve(name, config) for name in set(names)}
    judged = {name for name, kind in kinds.items() if getattr(kind, "requires_ground_truth", True)}
    rows: list[dict[str, Any]] = batch.drop_columns(["prompt"]).to_pylist()
    for at, (row, name) in enumerate(zip(rows, names, strict=True)):
        if name in judged:
            row |= _parsed_specs(row, f"{where}, row {first + at}, column")
            if spec_of(row)[1].get("ground_truth") is None:
                raise UserError(
                    f"{where}, row {first + at}, column reward_spec.ground_truth: it is missing; give the "
                    "right answer in the form that the environment compares with; an environment that needs none sets "
                    "requires_ground_truth = False"
                )
    return rows


def _parsed_specs(row: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the text columns among `SPECS`, parsed as JSON objects."""
    for column in SPECS:
        spec = row.get(column)
        if isinstance(spec, str) and spec:
            try:
                spec = safe_read.parse_json(spec)
            except safe_read.Malformed as error:
                raise UserError(f"{where} {column}: it is text, but not JSON ({error})", fix=ALLOWED_SPEC) from error
            yield column, spec
        if spec and not isinstance(spec, dict):
            raise UserError(f"{where} {column}: it is a {type(spec).__name__}", fix=ALLOWED_SPEC)
        if spec and spec.get("ground_truth") is not None:
            return  # the other column is not judged: it may hold a model's name or score
