"""Extends error messages about settings by settings that work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_mega.cli.inputs import check_layouts
from skyrl_mega.config.checks import check
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.planner import fit, fixes, micro_tokens
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.planner.search import Search

OWN_FIX = re.compile(r"[;,] (or )?(give [\w.]+=|leave )")
"""Pattern of messages already naming a fix."""


def wrong(config: Config, hf: Mapping[str, Any], *, planned: bool, strict: bool = False) -> UserError | None:
    """Returns the error of settings for a model, without looking at files; None if valid.

    `planned` is passed to `config.checks.check`, `strict` to `planner.fit.check`.
    """
    if found := wrong_settings(config, hf, planned=planned):
        return found
    try:
        fit.check(micro_tokens.decided(config, hf), hf, strict=strict)
    except UserError as error:
        return error
    return None


def wrong_settings(config: Config, hf: Mapping[str, Any], *, planned: bool) -> UserError | None:
    """Returns the error of settings for a model, without looking at files and memory; None if valid."""
    try:
        check(config, planned=planned)
        check_layouts(config, hf)
    except UserError as error:
        return error
    return None


def unrefused(found: Search, hf: Mapping[str, Any]) -> Search:
    """Returns a search result without suggestions refused by checks outside the search.

    Raises:
        UserError: All suggestions are refused; the error of the first one.
    """
    refused = [wrong_settings(one.config, hf, planned=True) for one in found.found]
    kept = [one for one, error in zip(found.found, refused, strict=True) if error is None]
    if not kept and (first := next(filter(None, refused), None)):
        raise first
    return replace(found, found=tuple(kept))


def with_fix(error: UserError, config: Config, hf: Mapping[str, Any], *, planned: bool) -> UserError:
    """Returns the error extended by the nearest settings passing every check of `wrong`, by estimates without a margin.

    Returns the error unchanged if it is about a file, already names a fix, or names none of the searched settings.
    """
    if OWN_FIX.search(str(error)):
        return error
    about_settings = any(key in str(error) or key.rpartition(".")[0] + ":" in str(error) for key in fixes.NEAR)
    if not about_settings or wrong(config, hf, planned=planned) is None:
        return error

    def verdict(other: Config) -> UserError | None:
        return wrong(other, hf, planned=planned, strict=True)

    both = config.cluster.shared and config.asynchrony.mode != "off"
    found = fixes.apart(config, verdict) if both else fixes.nearest(config, verdict, str(error))
    without = "" if config.asynchrony.mode == "off" else " without asynchrony.mode and asynchrony.max_staleness"
    more = "" if on_cpu(config) else f"; --suggest{without} searches further"
    if found:
        return UserError(f"{error}{more}; nearest that work: {'; or '.join(map(fixes.text, found))}")
    try:
        check(config, planned=planned)
        check_layouts(config, hf)
    except UserError:
        return error  # the message states the allowed values; only memory errors need the sentence below
    return UserError(f"{error}; nothing near these settings was found to fix it{more}")
