"""What is fed, by name; a module for each subject."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets import answers, code, endpoint, files, programs, search, settings, sql, tokenizer

TARGETS: Mapping[str, Target] = {
    **settings.TARGETS,
    **files.TARGETS,
    **tokenizer.TARGETS,
    **endpoint.TARGETS,
    **answers.TARGETS,
    **search.TARGETS,
    **programs.TARGETS,
    **code.TARGETS,
    **sql.TARGETS,
}
