"""`--suggest`: layouts that fit, compared with the settings as they are."""

from __future__ import annotations

import argparse
import json

from skyrl_mega.cli import inputs, refusal, suggest_changes, suggest_rows, suggest_simulated, suggest_text
from skyrl_mega.cli.suggest_progress import SearchProgress
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check_values
from skyrl_mega.config.checks.engines import check_topology
from skyrl_mega.config.command import DONE, WRONG_INPUT
from skyrl_mega.config.derived import generates_ahead
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import rates, search


def run(config: Config, args: argparse.Namespace) -> int:
    """Searches layouts for the settings' model, prints the report, and returns the exit code: 0 if one fits, else 2.

    Args:
        config: The settings.
        args: Options of `--suggest`.

    Raises:
        UserError: The settings cannot be planned, or no layout passes the checks.
    """
    check_values(Config(asynchrony=config.asynchrony))
    check_topology(config)
    if generates_ahead(config.asynchrony):
        raise UserError(
            "--suggest counts the phases of a step one after the other; --simulate finds a split "
            "and a mode. Or leave out asynchrony.mode=… and asynchrony.max_staleness=…, which is "
            "asynchrony.mode=off",
            key="asynchrony.mode",
            value=config.asynchrony.mode,
        )
    hf, _ = inputs.planned_inputs(config)
    config, used = rates.with_measured(config)
    progress = SearchProgress()
    with progress.running():
        result = search.search(config, hf, int(args.suggest) if args.suggest else None, progress)
    result = refusal.without_refused(result, hf)
    rows = suggest_rows.rows(config, hf, result.suggestions, result.gpus, used)
    simulated = None
    if rows.choices and not progress.interrupted:
        with progress.running():
            simulated = suggest_simulated.simulated(hf, rows, args, lambda: not progress.interrupted)
    comparison = suggest_changes.compare(config, rows, hf, used, result.gpus)
    report = suggest_text.Report(result, rows, config, architecture(hf).describe(hf), simulated, comparison)
    print(json.dumps(suggest_text.values(report)) if args.json else suggest_text.text(report))
    return DONE if result.suggestions else WRONG_INPUT
