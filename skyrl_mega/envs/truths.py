"""Checks of ground truths that environments share: can any answer equal what a row gives?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

ONE = "allowed is one text or number"
SPECS = ("reward_spec", "reward_model")
"""Columns that say how a row is judged; the latter in DAPO's files."""


def wrong_text(truth: Any) -> str | None:
    """Returns why a ground truth is not one text or number that says something; None if it is.

    Args:
        truth: `reward_spec.ground_truth` of a row.
    """
    if not isinstance(truth, str | Number):
        return f"it is a {type(truth).__name__}; {ONE}"
    text = str(truth).strip()
    if not text:
        return "it is empty; allowed is what the environment compares with"
    if isinstance(truth, float) and math.isnan(truth):
        return "it is no number; allowed is an answer that can be right"
    if is_json_object(text):
        return f"it is a JSON object, as text; {ONE}"
    return None


def wrong_spelling(truth: Any) -> str | None:
    """Returns why a ground truth that is compared letter by letter cannot be given; None if it can.

    A column of whole numbers with one gap becomes one of floats in pandas: 18 is then written as 18.0.

    Args:
        truth: `reward_spec.ground_truth` of a row.
    """
    if why := wrong_text(truth):
        return why
    if re.fullmatch(r"-?\d+\.0+", str(truth).strip()) or (isinstance(truth, float) and not _is_plain(truth)):
        return "answers are compared as text, and none is written so; allowed is a whole number without a point: 18"
    return None


def is_json_object(text: str) -> bool:
    """Returns whether a text is a JSON object."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def spec_of(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the column of a row that has its ground truth, and what the column holds; `{}` without one."""
    for column in SPECS:
        spec = row.get(column)
        if isinstance(spec, Mapping) and spec.get("ground_truth") is not None:
            return column, spec
    return SPECS[0], {}


def _is_plain(number: float) -> bool:
    return math.isfinite(number) and "e" not in repr(number)
