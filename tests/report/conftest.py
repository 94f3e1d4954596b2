"""Fixtures for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report import browser as chromium
from tests.report.browser import Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Yields a browser, or skips the test if none starts."""
    try:
        with chromium.browser(tmp_path_factory.mktemp("profile")) as opened:
            yield opened
    except chromium.NoBrowser as error:
        pytest.skip(f"{chromium.program()} does not start here: {error}")
