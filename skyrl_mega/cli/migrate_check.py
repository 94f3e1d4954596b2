"""Completion of a migrated run: a parallel layout instead of FSDP, and the result of a dry run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from skyrl_mega.cli import dry_run, inputs, refusal
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.migrate import text
from skyrl_mega.config.migrate.account import Migration
from skyrl_mega.config.schema import Config
from skyrl_mega.planner.candidates import changed

TENSOR, PIPELINE, CONTEXT, EXPERT = (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 8)
"""Parallel sizes tried for the layout."""
RING = {"policy.layout.context_exchange": "ring"}


def complete(migration: Migration) -> str:
    """Adds a layout to the migration if it needs one (`open_layout`), and checks the result by a dry run. `migration`
    is changed in place; without a fitting layout it stays as it is.

    Returns:
        A line for the user that begins with `passes`, with `layout and memory pass` (user code is not imported), or
        with `refused` and the error. A refusal raises no error.
    """
    try:
        config = composed(migration)
        if migration.open_layout:
            _choose_layout(migration, config)
            config = composed(migration)
        user_code = [*filter(None, (config.environment.reward_function, *config.environment.classes.values()))]
        if user_code:
            hf, _ = _model(config)
            if error := refusal.find_error(config, hf, planned=True):
                raise refusal.with_fix(error, config, hf, planned=True)
            return f"layout and memory pass; --dry-run also checks the data, and imports {', '.join(user_code)}"
        _, absent = dry_run.checked(config)
    except UserError as error:
        return f"refused: {'; '.join(error.lines)}"
    return "passes" + (f"; not on this machine: {', '.join(absent)}" if absent else "")


def composed(migration: Migration) -> Config:
    """Returns the migrated settings as composed by the launcher, by way of a temporary file.

    Raises:
        UserError: The launcher refuses a setting.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "migrated.yaml"
        file.write_text(text.as_yaml(migration, migration.program), encoding="utf-8")
        return compose(file)


def _choose_layout(migration: Migration, config: Config) -> None:
    """Adds the smallest layout that fits, with safe memory first; adds nothing if no layout fits."""
    hf, _ = _model(config)
    for strict in (True, False):
        for layout in _layouts(config, bool(hf.get("num_experts"))):
            trial = changed(config, tuple(layout.items()))
            if refusal.find_error(trial, hf, planned=True, strict=strict) is None:
                why = f"{migration.program} cut the model by FSDP, which has no such sizes: the smallest cut that fits"
                for key in layout.keys() & RING.keys():
                    migration.settings.pop(key, None)  # `add` keeps what is there
                migration.add("layout", layout, f"{why}; --suggest compares others")
                return


def _model(config: Config) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the model's config.json, without an import of the user's environments, and the absent paths."""
    without_code = replace(config.environment, classes={}, reward_function=None, default=None, options={})
    no_rows = replace(config.data, train=["absent.parquet"], eval=[], prepare=None)
    return inputs.planned_inputs(replace(config, environment=without_code, data=no_rows))


def _layouts(config: Config, experts: bool) -> Iterator[dict[str, Any]]:
    """Yields layouts from the fewest cuts to the most, with sizes of 1 left out.

    A context parallel size of the other program stays. Layouts with a ring follow those with the program's exchange,
    because the program may split heads that this project refuses to split.
    """
    names, given = ("tensor", "pipeline", "context", "expert"), config.policy.layout
    contexts = CONTEXT if given.context == 1 else (given.context,)
    sizes = product(TENSOR, PIPELINE, contexts, EXPERT if experts else (1,))
    ranks = config.cluster.nodes * config.cluster.gpus_per_node
    cuts = sorted(sizes, key=lambda cut: (cut[0] * cut[1] * cut[2], cut[1:], cut))
    for other, cut in product(({}, RING) if given.context_exchange != "ring" else ({},), cuts):
        if cut[0] <= config.cluster.gpus_per_node and cut[0] * cut[1] * cut[2] <= ranks:
            yield {f"policy.layout.{name}": size for name, size in zip(names, cut, strict=True) if size > 1} | other
