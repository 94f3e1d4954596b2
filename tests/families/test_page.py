"""docs/models.md equals the refusals of the code and the models of the sweeps."""

from __future__ import annotations

from pathlib import Path

from tests.families.models import MODELS, read_hf
from tests.families.page import PAGE, renewed


def test_the_table_of_models_is_up_to_date(families: Path) -> None:
    text = PAGE.read_text()
    configs = {name: read_hf(families / f"{name}-0") for name in MODELS}
    assert text == renewed(text, configs), "run: python -m tests.families.page --write"
