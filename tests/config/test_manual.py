"""docs/configuration.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from skyrl_mega.config.__main__ import manual


def test_the_manual_is_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert file.read_text() == manual(), "run: python -m skyrl_mega.config > docs/configuration.md"
