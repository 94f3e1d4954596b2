"""docs/configuration.md equals the schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from skyrl_mega.config.__main__ import manual
from skyrl_mega.config.keys import keys
from skyrl_mega.config.other_programs.lookup import names
from skyrl_mega.config.other_programs.page import MARK, renewed
from skyrl_mega.config.other_programs.table import alone


def test_the_manual_is_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert file.read_text() == manual(), "run: python -m skyrl_mega.config > docs/configuration.md"


def test_the_migration_pages_tables_are_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "migration.md"
    text = file.read_text()
    assert MARK in text and text == renewed(text), "run: python -m skyrl_mega.config.other_programs docs/migration.md"


def unnamed(settings: Iterable[str], alone: Iterable[str]) -> list[str]:
    """Returns the settings absent from all other programs and, like their groups, from `alone`."""
    listed = set(alone)
    return [setting for setting in settings if not listed.intersection(_groups(setting)) and not names(setting)]


def wrongly_alone(settings: Sequence[str], alone: Iterable[str]) -> list[str]:
    """Returns the entries of `alone` without a setting or group, or with a name in another program."""
    known = {group for setting in settings for group in _groups(setting)}
    return [each for each in alone if each not in known or (each in settings and names(each))]


def _groups(setting: str) -> list[str]:
    """Returns a.b.c, a.b and a for a.b.c."""
    parts = setting.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def test_every_setting_has_its_name_in_other_programs() -> None:
    settings = [name for name, key in keys().items() if not key.group]
    assert unnamed(settings, alone()) == [], "name it in config/other_programs/table.yaml, or under its `alone`"
    assert wrongly_alone(settings, alone()) == []


def test_a_setting_without_a_name_is_found() -> None:
    assert unnamed(["run.steps", "run.new", "warmup.new"], alone()) == ["run.new"]
    assert wrongly_alone(["run.steps", "run.seed"], ["run.steps", "run.gone", "run"]) == ["run.steps", "run.gone"]
