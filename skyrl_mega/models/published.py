"""The sizes of published models, for dry runs without the checkpoint on this machine.

The numbers come from each model's config.json on the Hugging Face hub. A run checks the loaded weights against the
config.json next to them, and uses this table only without such a file.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.published_configs import deepseek, experts, glm, gpt_oss, llama, qwen, qwen_delta

KNOWN: dict[str, dict[str, Any]] = {
    **qwen.MODELS,
    **qwen_delta.MODELS,
    **llama.MODELS,
    **glm.MODELS,
    **deepseek.MODELS,
    **experts.MODELS,
    **gpt_oss.MODELS,
}
"""Name on the Hugging Face hub → config.json."""

BUILT_LOCALLY = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Folder of the CPU recipes' model, built by `skyrl_mega.models.smollm2` → the model's name on the hub."""


def hub_name(path: str | PurePath) -> str | None:
    """Returns the hub name of the known model in a path's last component; None for other names. The path need not
    exist.

    `models/Qwen3-30B-A3B` gives `Qwen/Qwen3-30B-A3B`, as `Qwen/Qwen3-30B-A3B` does.
    """
    last = PurePath(path).name
    return next((name for name in KNOWN if name.partition("/")[2] == last), BUILT_LOCALLY.get(last))


def how_to_get(path: str | PurePath) -> str:
    """Returns a phrase for messages: the command to download or build the known model at this path.

    The phrase is "`COMMAND` fetches it" or "`COMMAND` makes it". Call only if `hub_name(path)` is not None: for other
    paths the command names None.
    """
    if PurePath(path).name in BUILT_LOCALLY:
        return f"`python -m skyrl_mega.models.smollm2 --output {path}` makes it"
    return f"`hf download {hub_name(path)} --local-dir {path}` fetches it"


def known(name: str | PurePath) -> dict[str, Any]:
    """Returns a copy (nested values are shared) of the content of the published config.json of a model, by hub name or
    by a path ending in the model's name. No file is read.

    Raises:
        UserError: The model is unknown.
    """
    known_name = hub_name(name)
    if known_name is None:
        raise UserError(f"no known model; known are {', '.join(KNOWN)}", key=name)
    return dict(KNOWN[known_name])
