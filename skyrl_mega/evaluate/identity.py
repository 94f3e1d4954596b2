"""What an evaluation's figures depend on, as a flat mapping: two evaluations that differ in it are not to be mixed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from skyrl_mega.config.derived import evaluation_sampling, length_limit, response_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.config.secrets import masked
from skyrl_mega.evaluate.endpoint import Endpoint

PLACES, BLOCK = 16, 64 * 1024
"""Of a weight file so many blocks of so many bytes are read, and not all of 60 GB: training changes every one."""
WHOLE = (".json", ".jinja", ".txt", ".model")
"""Files of a model's directory that are read whole: settings, tokenizer, template."""


def identity(config: Config, endpoint: Endpoint | None) -> dict[str, Any]:
    """Setting → value, JSON values only. Who computes, how fast and for how many samples is no part of it.

    Args:
        config: The settings.
        endpoint: What is asked in place of `model.path`.
    """
    sampling, environment = evaluation_sampling(config), config.environment
    if endpoint is None:
        asked = {
            "model.path (its content)": fingerprint(Path(config.model.path)),
            "model.dtype": config.model.dtype,
            "rollout.max_prompt_tokens": config.rollout.max_prompt_tokens,
        }
    else:
        asked = {
            "--endpoint": endpoint.url,
            "--served-model": endpoint.model,
            "--request": shown(endpoint.extra),
        }
    return {
        **asked,
        "run.seed": config.run.seed,
        "evaluation.temperature": sampling.temperature,
        "evaluation.top_p": sampling.top_p,
        "rollout.sampling.top_k": sampling.top_k,
        "rollout.sampling.max_tokens": sampling.max_tokens,
        "rollout.sampling.stop": list(sampling.stop),
        "rollout.conversation": config.rollout.conversation,
        "rollout.chat_template_options": shown(config.rollout.chat_template_options),
        "rollout.max_turns": config.rollout.max_turns,
        "rollout.max_response_tokens": response_limit(config.rollout),
        "rollout.max_input_tokens": config.rollout.max_input_tokens,
        "rollout.max_length": length_limit(config.rollout),
        "environment.default": environment.default,
        "environment.classes": environment.classes,
        "environment.options": shown(environment.options, "environment.options"),
        "environment.retriever.index": environment.retriever.index,
        "environment.retriever.topk": environment.retriever.topk,
        "environment.retriever.passage_chars": environment.retriever.passage_chars,
    }


def shown(options: Any, key: str = "") -> Any:
    """Options as JSON values; a digest of them where some are secrets."""
    plain = json.loads(json.dumps(options, default=str))
    return plain if masked(plain, key) == plain else digest(plain)


def alike(one: Any, other: Any) -> bool:
    """Whether two values of an identity are the same, wherever they came from: either may be shown as a digest."""
    return one == other or digest(one) == other or one == digest(other)


def digest(value: Any) -> str:
    """The same for the same value, and slow to guess from."""
    text = json.dumps(value, sort_keys=True)
    found = hashlib.scrypt(text.encode(), salt=b"skyrl_mega.evaluate", n=2**13, r=8, p=1, dklen=8)
    return f"scrypt {found.hex()}"


def fingerprint(model: Path) -> str:
    """A digest of a Hugging Face directory's content, wherever it lies: small files whole, weights in places."""
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
