"""A refusal that says what would work."""

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
"""What a line has that says what to do."""


def wrong(config: Config, hf: Mapping[str, Any], *, planned: bool, strict: bool = False) -> UserError | None:
    """What is wrong with settings for a model, files not looked at; None where nothing is.

    `planned` is `config.checks.check`'s, `strict` is `planner.fit.check`'s.
    """
    if found := wrong_settings(config, hf, planned=planned):
        return found
    try:
        fit.check(micro_tokens.decided(config, hf), hf, strict=strict)
    except UserError as error:
        return error
    return None


def wrong_settings(config: Config, hf: Mapping[str, Any], *, planned: bool) -> UserError | None:
    """The same, memory not looked at."""
    try:
        check(config, planned=planned)
        check_layouts(config, hf)
    except UserError as error:
        return error
    return None


def unrefused(found: Search, hf: Mapping[str, Any]) -> Search:
    """What a search has found, without what these checks refuse for settings that it does not look at.

    Raises:
        UserError: They refuse all of it, the first for this.
    """
    refused = [wrong_settings(one.config, hf, planned=True) for one in found.found]
    kept = [one for one, error in zip(found.found, refused, strict=True) if error is None]
    if not kept and (first := next(filter(None, refused), None)):
        raise first
    return replace(found, found=tuple(kept))


def with_fix(error: UserError, config: Config, hf: Mapping[str, Any], *, planned: bool) -> UserError:
    """The refusal, and the nearest settings that pass every check of `wrong`, by estimates without a margin.

    A refusal that names none of the settings that are searched, that says itself what to paste or to leave out, or that
    is about a file, stays as it is.
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
        return error  # its line says what is allowed; of memory alone there is nothing to say but that it is too little
    return UserError(f"{error}; nothing near these settings was found to fix it{more}")
