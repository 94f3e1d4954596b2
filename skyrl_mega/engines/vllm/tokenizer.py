"""The tokenizer with which vLLM looks for stop strings: the renderer's, not the class named by a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl_mega.hf_checkpoint.tokenizer import load


class VerifiedTokenizer:
    """A tokenizer class for vLLM's `tokenizer_mode` of this name (`plugin.TOKENIZER`)."""

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> Any:
        """Returns the tokenizer of the directory `path`, verified by `hf_checkpoint.tokenizer.load`, with vLLM's cached
        attributes. Ignores `options`.

        Raises:
            UserError: The tokenizer cannot be loaded, or loses text; names `model.path`.
        """
        from vllm.tokenizers.hf import get_cached_tokenizer

        return get_cached_tokenizer(load(Path(path), "model.path"))
