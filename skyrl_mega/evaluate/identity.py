"""The settings that an evaluation's scores depend on, as a flat mapping. Samples under different settings must not be
mixed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from skyrl_mega.common.secrets import masked
from skyrl_mega.config.derived import evaluation_sampling, length_limit, response_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.evaluate.endpoint import Endpoint

PLACES, BLOCK = 16, 64 * 1024
"""Number and size in bytes of the blocks read per weight file, instead of 60 GB: training changes every block."""
WHOLE = (".json", ".jinja", ".txt", ".model")
"""Suffixes of files read completely: settings, tokenizer, template."""


def identity(config: Config, endpoint: Endpoint | None) -> dict[str, Any]:
    """Returns setting → JSON value, for all settings that a sample depends on. Hardware, speed and number of samples
    are not included.

    Args:
        config: The settings.
        endpoint: The endpoint in place of `model.path`; None reads the files of `model.path`.

    Raises:
        OSError: A file of `model.path` cannot be read.
    """
    sampling, environment = evaluation_sampling(config), config.environment
    if endpoint is None:
        target = {
            "model.path (its content)": fingerprint(Path(config.model.path)),
            "model.dtype": config.model.dtype,
            "rollout.max_prompt_tokens": config.rollout.max_prompt_tokens,
        }
    else:
        target = {
            "--endpoint": endpoint.url,
            "--served-model": endpoint.model,
            "--request": json_or_digest(endpoint.extra),
        }
    return {
        **target,
        "run.seed": config.run.seed,
        "evaluation.temperature": sampling.temperature,
        "evaluation.top_p": sampling.top_p,
        "rollout.sampling.top_k": sampling.top_k,
        "rollout.sampling.max_tokens": sampling.max_tokens,
        "rollout.sampling.stop": list(sampling.stop),
        "rollout.conversation": config.rollout.conversation,
        "rollout.chat_template_options": json_or_digest(config.rollout.chat_template_options),
        "rollout.max_turns": config.rollout.max_turns,
        "rollout.max_response_tokens": response_limit(config.rollout),
        "rollout.max_input_tokens": config.rollout.max_input_tokens,
        "rollout.max_length": length_limit(config.rollout),
        "environment.default": environment.default,
        "environment.reward_function": environment.reward_function,
        "environment.classes": environment.classes,
        "environment.options": json_or_digest(environment.options, "environment.options"),
        "environment.retriever.index": environment.retriever.index,
        "environment.retriever.topk": environment.retriever.topk,
        "environment.retriever.passage_chars": environment.retriever.passage_chars,
    }


def json_or_digest(options: Any, key: str = "") -> Any:
    """Returns options as JSON values; if an option may be secret, a digest (`digest`) of all options instead.

    Args:
        options: Settings with JSON values.
        key: Setting of the options, for the search for secrets.
    """
    plain = json.loads(json.dumps(options, default=str))
    return plain if masked(plain, key) == plain else digest(plain)


def equal_or_digest(one: Any, other: Any) -> bool:
    """Returns True if two values of an identity are equal, with either possibly in the form of a digest."""
    return one == other or digest(one) == other or one == digest(other)


def digest(value: Any) -> str:
    """Returns a digest of a JSON value (else TypeError), `scrypt` and 16 hex digits. Equal values have equal digests,
    and reversing a digest by guessing is slow."""
    text = json.dumps(value, sort_keys=True)
    key = hashlib.scrypt(text.encode(), salt=b"skyrl_mega.evaluate", n=2**13, r=8, p=1, dklen=8)
    return f"scrypt {key.hex()}"


def fingerprint(model: Path) -> str:
    """Returns 16 hex digits that identify the content of the Hugging Face directory `model`, whatever its path.

    Of a weight file, `PLACES` blocks are read; files with a suffix in `WHOLE` are read whole, all others ignored.

    Raises:
        OSError: The directory is missing, or a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()):
        if file.suffix in WHOLE:
            digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
        elif file.suffix == ".safetensors":
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                for place in range(PLACES):
                    content.seek(max(0, size - BLOCK) * place // (PLACES - 1))
                    digest.update(content.read(BLOCK))
    return digest.hexdigest()[:16]
