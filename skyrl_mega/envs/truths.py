"""Checks of ground truths shared by environments: can any answer equal a row's ground truth?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from numbers import Number
from typing import Any

ALLOWED = "allowed is one text or number"
SPECS = ("reward_spec", "reward_model")
"""Columns describing how a row is judged; `reward_model` in DAPO's files."""


def wrong_text(truth: Any) -> str | None:
    """Returns the reason why a ground truth is not a single non-empty text or number; None if valid. NaN, and a JSON
    object as text, are not valid.

    Args:
        truth: `reward_spec.ground_truth` of a row.
    """
    if not isinstance(truth, str | Number):
        return f"it is a {type(truth).__name__}; {ALLOWED}"
    text = str(truth).strip()
    if not text:
        return "it is empty; allowed is the right answer in the form that the environment compares with"
    if isinstance(truth, float) and math.isnan(truth):
        return "it is no number; allowed is an answer that can be right"
    if is_json_object(text):
        return f"it is a JSON object, as text; {ALLOWED}"
    return None


def wrong_spelling(truth: Any) -> str | None:
    """Returns the reason why no answer can equal a ground truth compared letter by letter; None if an answer can.

    In pandas, a column of whole numbers with one gap becomes a column of floats, so 18 is written as 18.0.

    Args:
        truth: `reward_spec.ground_truth` of a row.
    """
    if reason := wrong_text(truth):
        return reason
    if re.fullmatch(r"-?\d+\.0+", str(truth).strip()) or (isinstance(truth, float) and not _is_plain(truth)):
        return "answers are compared as text, and none is written so; allowed is a whole number without a point: 18"
    return None


def is_json_object(text: str) -> bool:
    """Returns True if a text is a JSON object, such as `{"a": 1}`."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def spec_of(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns name and content of the row's first column in `SPECS` with a ground truth; `reward_spec` and {} without
    any."""
    for column in SPECS:
        spec = row.get(column)
        if isinstance(spec, Mapping) and spec.get("ground_truth") is not None:
            return column, spec
    return SPECS[0], {}


def _is_plain(number: float) -> bool:
    return math.isfinite(number) and "e" not in repr(number)
