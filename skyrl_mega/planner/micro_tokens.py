"""The tokens of a micro-batch where `policy.micro_tokens` is null: the most with which everything fits.

Few large micro-batches are faster than many small ones: each touches all gradients once, and fills a GPU better.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.leftovers import partial_file
from skyrl_mega.config.derived import planned_device
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import json_object
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit

MICRO_TOKENS = (4096, 8192, 16384, 32768, 65536)
"""What is tried, here and by a search of layouts."""
MOST = {"cuda": 32768, "cpu": 8192}
"""Above so many a row gains no speed that its memory would be worth."""
FILE = "micro_tokens.json"
"""In a run's folder: what was decided as it first started, which it keeps when it goes on."""


def decided(config: Config, hf: Mapping[str, Any]) -> Config:
    """The settings with a number of tokens: their own, or the largest of those tried with which nothing is too tight,
    by the estimates at their face, but what is so with the least too.

    Args:
        config: The settings, whose layouts have been checked.
        hf: The model's config.json.
    """
    if config.policy.micro_tokens is not None:
        return config
    d, sizes = architecture(hf).describe(hf), _tried(config)
    found = [{*fit.problems(_with(config, size), d, strict=True)} for size in sizes]
    return _with(config, max(size for size, problems in zip(sizes, found, strict=True) if problems <= found[0]))


def of_run(config: Config, hf: Mapping[str, Any], folder: Path, *, resumes: bool) -> Config:
    """The same for a run: one that goes on has what it had.

    Args:
        config: The settings.
        hf: The model's config.json.
        folder: The run's.
        resumes: It goes on from a checkpoint.

    Raises:
        UserError: What it had cannot be read.
    """
    if config.policy.micro_tokens is not None:
        return config
    file, fix = folder / FILE, "remove it, and it is decided once more, or give policy.micro_tokens"
    if resumes and file.exists():
        had = json_object(file, fix).get("policy.micro_tokens")
        if had not in MICRO_TOKENS:
            raise UserError(f"{file}: policy.micro_tokens is none of {', '.join(map(str, MICRO_TOKENS))}; {fix}")
        return _with(config, had)
    found = decided(config, hf)
    with partial_file(file) as partial:
        partial.write_text(json.dumps({"policy.micro_tokens": found.policy.micro_tokens}) + "\n")
        os.replace(partial, file)
    return found


def note(config: Config, found: Config, d: Decoder) -> str | None:
    """What to say of a number that was decided; None where it was given.

    Args:
        config: The settings as they are given.
        found: As `decided` has them.
        d: The model.
    """
    if config.policy.micro_tokens is not None:
        return None
    size, sizes = found.policy.micro_tokens, _tried(config)
    if fit.problem(found, d, strict=True) is None:
        why = "the largest" if size == sizes[-1] else "the largest that fits"
    elif size == sizes[0]:
        why = "the least"
    elif size == sizes[-1]:
        why = "the largest, as what is tight does not depend on it,"
    else:
        why = "the largest with which no more is tight than with the least,"
    return f"policy.micro_tokens=null is {size} here: {why} of {', '.join(map(str, sizes))}"


def _tried(config: Config) -> tuple[int, ...]:
    most = MOST[planned_device(config)]
    return tuple(size for size in MICRO_TOKENS if size <= most)


def _with(config: Config, size: int) -> Config:
    return replace(config, policy=replace(config.policy, micro_tokens=size))
