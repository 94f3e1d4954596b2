"""Names of evaluation sets, derived from the `data_source` of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from skyrl_mega.envs.prompt import Prompt

UNNAMED = "data"
"""Name of the set of rows without a `data_source`."""


def source_of(prompt: Prompt) -> str:
    """Returns the `data_source` of a prompt's row as text, unchanged; "data" without a data source."""
    return str(prompt.extras.get("data_source") or UNNAMED)


def set_names(sources: Iterable[str], allowed: str = r"\w.-") -> dict[str, str]:
    """Returns data source → name, without characters forbidden in names of metrics and files.

    Two sources never share a name: `nq/open` becomes `nq_open`, or `nq_open_2` if another source has the name already.
    Dots at the start are removed; a name that is then empty becomes `UNNAMED`.

    Args:
        sources: Data sources of the rows.
        allowed: Allowed characters of a name, as inside the brackets of a regular expression.
    """
    plain = {source: re.sub(rf"[^{allowed}]+", "_", source).lstrip(".") or UNNAMED for source in sources}
    names: dict[str, str] = {}
    for source in sorted(plain, key=lambda source: (plain[source] != source, source)):  # a valid name is kept
        name, number = plain[source], 1
        while name in names.values():
            number += 1
            name = f"{plain[source]}_{number}"
        names[source] = name
    return names
