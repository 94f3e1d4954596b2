"""`python -m skyrl_mega.config.other_programs docs/migration.md`: writes the tables of keys into the page."""

from __future__ import annotations

import sys
from pathlib import Path

from skyrl_mega.config.command import DONE, Parser, guarded, path_of
from skyrl_mega.config.other_programs.page import renewed


def main() -> int:
    """Regenerates the tables in the page named on the command line, in place; returns the exit code 0. Raises
    OSError if the page cannot be read or written."""
    p = Parser(prog="python -m skyrl_mega.config.other_programs", description=__doc__, allow_abbrev=False)
    p.add_argument("page", type=path_of, help="docs/migration.md")
    page: Path = p.parse_args().page
    page.write_text(renewed(page.read_text()))
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(main))
