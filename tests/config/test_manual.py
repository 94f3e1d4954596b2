"""docs/configuration.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from skyrl_mega.config.__main__ import manual
from skyrl_mega.config.keys import keys
from skyrl_mega.config.other_programs import ours
from skyrl_mega.config.other_programs.page import MARK, renewed


def test_the_manual_is_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert file.read_text() == manual(), "run: python -m skyrl_mega.config > docs/configuration.md"


def test_the_migration_pages_tables_are_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "migration.md"
    text = file.read_text()
    assert MARK in text and text == renewed(text), "run: python -m skyrl_mega.config.other_programs docs/migration.md"


def test_every_setting_has_its_name_in_other_programs() -> None:
    settings = [name for name, key in keys().items() if not key.group]
    assert ours.unnamed(settings) == [], "name it in config/other_programs, or in ALONE of its file ours.py"
    assert ours.wrongly_alone(settings) == []


def test_a_setting_without_a_name_is_found() -> None:
    assert ours.unnamed(["run.steps", "run.new", "warmup.new"]) == ["run.new"]
    assert ours.wrongly_alone(["run.steps", "run.seed"], ["run.steps", "run.gone", "run"]) == ["run.steps", "run.gone"]
