"""The table of docs/algorithms.md that says which settings a published algorithm is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from skyrl_mega.algorithms.advantages import ADVANTAGES
from skyrl_mega.algorithms.losses import LOSSES
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.keys import keys
from skyrl_mega.config.unread import unread_notes

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def lines() -> dict[str, list[str]]:
    """Name → its settings."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Published names and their settings\n")
    found = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    return {name: shlex.split(settings) for name, settings in found}


LINES = lines()


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_accepted_whole(name: str, base: Path) -> None:
    config = compose(base, LINES[name])
    check(config, planned=True)
    assert unread_notes(config) == []


@pytest.mark.parametrize("name", LINES)
def test_a_line_says_nothing_that_is_the_default(name: str) -> None:
    for setting in LINES[name]:
        key, _, value = setting.partition("=")
        if key in keys():
            default = keys()[key].default
            assert value != (str(default).lower() if isinstance(default, bool) else str(default)), setting


def test_no_two_names_are_the_same_line() -> None:
    assert len({tuple(sorted(settings)) for settings in LINES.values()}) == len(LINES) > 30


def test_every_advantage_and_loss_has_a_line() -> None:
    settings = {setting for line in LINES.values() for setting in line}
    assert {name for name in ADVANTAGES if f"algorithm.advantage={name}" not in settings} == {"grpo"}
    assert {name for name in LOSSES if f"algorithm.loss={name}" not in settings} == {"ppo"}
