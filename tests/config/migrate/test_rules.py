"""The data of the translation: complete, and consistent with the table of names."""

from __future__ import annotations

import pytest
import yaml

from skyrl_mega.config.keys import keys
from skyrl_mega.config.migrate.conversions import CONTEXTUAL, CONVERSIONS
from skyrl_mega.config.migrate.rules import FILE, conversion, notes, rules
from skyrl_mega.config.other_programs import lookup
from skyrl_mega.config.other_programs.table import programs

CONTENT = yaml.safe_load(FILE.read_text())
ALLOWED = {*CONVERSIONS, "figures"}


def test_a_note_decides_about_the_value() -> None:
    missing = [
        f"{program} {key}: {entry.note}"
        for program, table in programs().items()
        for key, entry in table.items()
        if entry.note and any("=" not in name for name in entry.here) and conversion(program, key, entry) is None
    ]
    assert not missing, "say in migrate/translation.yaml what happens to the value"


def test_every_note_is_in_the_table() -> None:
    used = {" ".join(entry.note.split()) for table in programs().values() for entry in table.values()}
    assert set(notes()) - used == set()


def test_every_note_that_needs_a_look_is_in_the_table() -> None:
    used = {" ".join(entry.note.split()) for table in programs().values() for entry in table.values()}
    used |= {v.note for table in programs().values() for entry in table.values() for v in entry.values.values()}
    assert set(CONTENT["look"]) - used == set()


@pytest.mark.parametrize("program", programs())
def test_every_key_is_in_the_table(program: str) -> None:
    table, of = programs()[program], rules(program)
    governed = {key for switch in of.switches.values() for key in switch.governed}
    named = {key.partition("=")[0] for key in of.keys} | set(of.switches) | governed | set(of.defaults)
    groups = {key for key in named if key.endswith(".*")}
    assert [key for key in groups if not any(name.startswith(key[:-1]) for name in table)] == []
    assert [key for key in named - groups if lookup.find(table, key) is None] == []
    for key in of.keys:
        name, _, value = key.partition("=")
        assert not value or value in lookup.find(table, name).values, key  # type: ignore[union-attr]
    assert all(name in keys() for name in of.fixed)


def test_every_conversion_exists() -> None:
    used = {c.name for c in notes().values()} | {c.name for p in programs() for c in rules(p).keys.values()}
    assert used <= ALLOWED and set(CONTEXTUAL) <= set(CONVERSIONS)
    assert {name for name in CONVERSIONS if name not in used} == set()


def test_settings_of_the_data_are_settings() -> None:
    conversions = [*notes().values(), *(c for program in programs() for c in rules(program).keys.values())]
    named = [name for c in conversions if isinstance(c.argument, dict) for name in c.argument]
    named += [
        c.argument for c in conversions if c.name in ("divided_by", "divides", "times") and isinstance(c.argument, str)
    ]
    assert [name for name in named if name not in keys() and not name.startswith("rollout.options.")] == []
