"""Extends error messages about settings by settings that work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_mega.cli.layout_checks import check_layouts
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.schema import Config
from skyrl_mega.planner import fit, fixes, micro_tokens
from skyrl_mega.planner.candidates import as_arguments
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.planner.search import SearchResult


def find_error(config: Config, hf: Mapping[str, Any], *, planned: bool, strict: bool = False) -> UserError | None:
    """Returns the first error of the settings for a model; None if the run is valid and fits.

    Checks the settings, the parallel layouts, the number of nodes, and the memory. Reads no files, except the row
    counts of `data.eval` for the memory of sandboxes.

    Args:
        config: The settings.
        hf: The model's config.json.
        planned: True if nothing will be started. Settings supported only in a plan are then accepted, and
            `cluster.device=auto` means GPUs.
        strict: True to reject memory estimates above the limit. False also accepts an estimate that fits after
            subtracting the planner's margin.
    """
    if settings_error := find_settings_error(config, hf, planned=planned):
        return settings_error
    try:
        fit.check(micro_tokens.with_micro_tokens(config, hf), hf, strict=strict)
    except UserError as error:
        return error
    return None


def find_settings_error(config: Config, hf: Mapping[str, Any], *, planned: bool) -> UserError | None:
    """Returns the first error of the settings for a model, without looking at files and memory; None if valid.

    Args:
        config: The settings.
        hf: The model's config.json.
        planned: True if nothing will be started. Settings supported only in a plan are then accepted, and
            `cluster.device=auto` means GPUs.
    """
    try:
        check(config, planned=planned)
        check_layouts(config, hf)
    except UserError as error:
        return error
    return None


def without_refused(result: SearchResult, hf: Mapping[str, Any]) -> SearchResult:
    """Returns a search result without the suggestions that `find_settings_error` rejects.

    Raises:
        UserError: All suggestions are rejected; the error of the first suggestion.
    """
    errors = [find_settings_error(suggestion.config, hf, planned=True) for suggestion in result.suggestions]
    kept = [suggestion for suggestion, error in zip(result.suggestions, errors, strict=True) if error is None]
    if not kept and (first := next(filter(None, errors), None)):
        raise first
    return replace(result, suggestions=tuple(kept))


def with_fix(error: UserError, config: Config, hf: Mapping[str, Any], *, planned: bool) -> UserError:
    """Returns the error with a fix appended: the nearest settings that pass `find_error` with `strict`, if any.

    Searches other settings, which may take seconds. Returns the error unchanged if it is about a file, already names a
    fix, or names none of the searched settings.

    Args:
        error: An error of these settings.
        config: The settings.
        hf: The model's config.json.
        planned: True if nothing will be started, as in `find_error`.
    """
    if error.fix or not fixes.concerns_settings(error) or find_error(config, hf, planned=planned) is None:
        return error

    def verdict(other: Config) -> UserError | None:
        return find_error(other, hf, planned=planned, strict=True)

    shares_and_generates_ahead = config.cluster.shared and config.asynchrony.mode != "off"
    changes = (
        fixes.separate_or_synchronous(config, verdict)
        if shares_and_generates_ahead
        else fixes.nearest(config, verdict, error)
    )
    leaving_out = "" if config.asynchrony.mode == "off" else " without asynchrony.mode and asynchrony.max_staleness"
    hints = [] if on_cpu(config) else [f"--suggest{leaving_out} searches further"]
    if changes:
        offered = "; or ".join(map(as_arguments, changes))
        return error.with_fix("; ".join([*hints, f"nearest that work: {offered}"]))
    if find_settings_error(config, hf, planned=planned):
        return error  # the message states the allowed values; only memory errors need the sentence below
    return error.with_fix("; ".join(["nothing near these settings was found to fix it", *hints]))
