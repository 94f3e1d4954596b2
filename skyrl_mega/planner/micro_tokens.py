"""Chooses the tokens of a micro-batch if `policy.micro_tokens` is null: the largest candidate with which everything
fits.

Few large micro-batches are faster than many small ones: each micro-batch reads and writes all gradients, and a large
one uses a GPU better.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.temporary_files import write_whole
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import read_json
from skyrl_mega.config.derived import planned_device
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import fit

MICRO_TOKENS = (4096, 8192, 16384, 32768, 65536)
"""Candidates, also of the layout search."""
MOST = {"cuda": 32768, "cpu": 8192}
"""Largest candidate by device; a longer row gains no speed worth the memory."""
FILE = "micro_tokens.json"
"""File in a run's folder with the choice made at the first start. A resumed run keeps this choice."""


def with_micro_tokens(config: Config, hf: Mapping[str, Any]) -> Config:
    """Returns the settings with `policy.micro_tokens` set. A given number stays. For null, takes the largest candidate
    with no memory problem beyond those of the smallest candidate, by estimates without a margin. If not even the
    smallest fits, the smallest or a larger one with the same problems is taken, without an error; the checks of the
    memory (`fit.check`) report that.

    Args:
        config: The settings, with checked layouts.
        hf: The model's config.json.

    Raises:
        UserError: For null, the model's family is unknown, or the files of drafts (`rollout.drafts`) cannot be used.
    """
    if config.policy.micro_tokens is not None:
        return config
    decoder, sizes = architecture(hf).describe(hf), _candidates(config)
    by_size = [{*map(str, fit.problems(_with_size(config, size), decoder, strict=True))} for size in sizes]
    return _with_size(
        config, max(size for size, problems in zip(sizes, by_size, strict=True) if problems <= by_size[0])
    )


def for_run(config: Config, hf: Mapping[str, Any], folder: Path, *, resumes: bool) -> Config:
    """Returns the settings of a run with `policy.micro_tokens` set, and writes a new choice to `FILE` in the run's
    folder, replacing an earlier file. A resumed run keeps the choice in this file, or chooses again if the file is
    missing. A number given in the settings stays, and no file is read or written.

    Args:
        config: The settings, with checked layouts.
        hf: The model's config.json.
        folder: The run's folder.
        resumes: True if the run resumes from a checkpoint.

    Raises:
        UserError: The file of a resumed run cannot be read, or its number is no candidate. For a new choice, the
            model's family is unknown, or the files of drafts (`rollout.drafts`) cannot be used.
        OSError: The file cannot be written.
    """
    if config.policy.micro_tokens is not None:
        return config
    file, fix = folder / FILE, "remove the file, and the run chooses again, or give policy.micro_tokens"
    if resumes and file.exists():
        previous = read_json(file, fix).get("policy.micro_tokens")
        if previous not in MICRO_TOKENS:
            raise UserError(
                f"its policy.micro_tokens is none of {', '.join(map(str, MICRO_TOKENS))}", key=file, fix=fix
            )
        return _with_size(config, previous)
    decided = with_micro_tokens(config, hf)
    write_whole(file, json.dumps({"policy.micro_tokens": decided.policy.micro_tokens}).encode() + b"\n")
    return decided


def note(config: Config, decided: Config, decoder: Decoder) -> str | None:
    """Returns a sentence explaining the chosen number; None if the user gave a number. Raises UserError if the files of
    drafts (`rollout.drafts`) cannot be used.

    Args:
        config: The settings as given.
        decided: The settings returned by `with_micro_tokens`.
        decoder: The model.
    """
    if config.policy.micro_tokens is not None:
        return None
    size, sizes = decided.policy.micro_tokens, _candidates(config)
    if fit.problem(decided, decoder, strict=True) is None:
        why = "the largest" if size == sizes[-1] else "the largest that fits"
    elif size == sizes[0]:
        why = "the least"
    elif size == sizes[-1]:
        why = "the largest, as the lack of memory does not depend on this setting,"
    else:
        why = "the largest without a lack of memory that the least has not,"
    return f"policy.micro_tokens=null is {size} here: {why} of {', '.join(map(str, sizes))}"


def _candidates(config: Config) -> tuple[int, ...]:
    most = MOST[planned_device(config)]
    return tuple(size for size in MICRO_TOKENS if size <= most)


def _with_size(config: Config, size: int) -> Config:
    return replace(config, policy=replace(config.policy, micro_tokens=size))
