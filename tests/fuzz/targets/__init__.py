"""All fuzzing targets by name; a module per subject."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    answers,
    code,
    data,
    endpoint,
    files,
    programs,
    report,
    search,
    service,
    settings,
    sql,
    tokenizer,
)

TARGETS: Mapping[str, Target] = {
    **settings.TARGETS,
    **files.TARGETS,
    **data.TARGETS,
    **tokenizer.TARGETS,
    **endpoint.TARGETS,
    **answers.TARGETS,
    **report.TARGETS,
    **search.TARGETS,
    **service.TARGETS,
    **programs.TARGETS,
    **code.TARGETS,
    **sql.TARGETS,
}
