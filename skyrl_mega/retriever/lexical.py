"""Lexical search: BM25, with bm25s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np
import numpy.typing as npt

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import read_json

K1, B = 0.9, 0.4
"""Values of Anserini, used for the published BM25 results in open-domain question answering."""
ARRAYS = ("indptr", "indices", "data")
"""Names of the arrays of an index, a file each."""


def build_bm25(texts: Sequence[str], folder: Path) -> None:
    """Writes a BM25 index of `texts` to `folder`: lower case, words of at least two letters, without English stop
    words.

    Raises:
        UserError: No text contains such a word.
    """
    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    tokens = bm25s.tokenize(list(texts), stopwords="en", show_progress=False)
    if not any(map(len, tokens.ids)):
        raise UserError(
            "no passage has a word that BM25 keeps, of two letters or more and no English stop word",
            key="--corpus",
            fix="give another corpus, or --methods dense",
        )
    index.index(tokens, show_progress=False)
    index.save(folder, show_progress=False)


def damaged(folder: Path) -> Path:
    """Returns the path of the first missing or unreadable file of a BM25 index; `folder` itself if all are readable."""
    for name in ("params.index.json", "vocab.index.json", *(f"{part}.csc.index.npy" for part in ARRAYS)):
        file = folder / name
        try:
            if file.suffix == ".npy":
                np.load(file, mmap_mode="r", allow_pickle=False)
            else:
                read_json(file, "")
        except (OSError, ValueError, EOFError, UserError):
            return file
    return folder


class Bm25Index:
    """A BM25 index opened for searches, memory-mapped.

    Args:
        folder: Written by `build_bm25`.

    Raises:
        ValueError: The files do not belong to the same index. Unreadable files raise many kinds of errors.
    """

    def __init__(self, folder: Path) -> None:
        self.index = bm25s.BM25.load(folder, mmap=True)
        self.size = int(self.index.scores["num_docs"])
        indptr, indices, data = (self.index.scores[part] for part in ARRAYS)
        words = len(self.index.vocab_dict.keys() - {""})
        if len(indptr) <= words or not len(indices) == len(data) == indptr[-1]:
            raise ValueError("its files are not of one index")

    def search(self, queries: Sequence[str], topk: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Returns scores and passage rows, both [len(queries), topk], best first.

        A place without a matching passage has row -1 and score 0.
        """
        tokens = bm25s.tokenize(list(queries), stopwords="en", return_ids=False, show_progress=False)
        scores = np.zeros((len(queries), topk), np.float32)
        rows = np.full((len(queries), topk), -1, np.int64)
        count = min(topk, self.size)
        for i, words in enumerate(tokens):
            indexed = [word for word in words if word in self.index.vocab_dict]
            if indexed:
                best, score = self.index.retrieve([indexed], k=count, show_progress=False)
                earned = score[0] > 0
                scores[i, :count][earned], rows[i, :count][earned] = score[0][earned], best[0][earned]
        return scores, rows
