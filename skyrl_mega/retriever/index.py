"""An opened index folder: passages, with dense search, BM25 search or both.

index.json        the inputs of the build (`Recipe`), and the number of passages
passages.arrow    id and contents, memory-mapped
dense.faiss       for `dense`
bm25/             for `bm25`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import check_folder, read_json
from skyrl_mega.common.values import shown
from skyrl_mega.retriever.client import Hit
from skyrl_mega.retriever.embedder import MINILM, Embedder, model_folder

FORM = 1
"""Version of the folder layout; an index of another version is rebuilt."""
METHODS = ("dense", "bm25")
BUILD = "build an index with python -m skyrl_mega.retriever build"
AGAIN = "remove the folder and build the index again"
"""Fixes of errors: there is no index; a file of an index is damaged."""


@dataclass(frozen=True)
class Recipe:
    """All inputs that determine an index: equal recipes give equal indexes."""

    corpus: str
    """Fingerprint of the corpus file."""
    methods: tuple[str, ...] = METHODS
    """`dense`, `bm25` or both; the first is the service's default."""
    model: str = MINILM
    """Embedding model of `dense`, for passages and queries: a Hugging Face directory, or `minilm`."""
    query_prefix: str = ""
    """Text before each query."""
    passage_prefix: str = ""
    """Text before each passage."""
    dtype: str = "float32"
    """Data type of the embedding model."""
    faiss: str = "Flat"
    """FAISS's description of the dense index."""
    limit: int | None = None
    """Maximum number of passages, from the beginning of the corpus; None takes all."""
    form: int = FORM
    """Version of the folder layout."""

    def text(self, passages: int) -> str:
        """Returns the content of `index.json`: this recipe and the number of passages, as JSON."""
        return json.dumps({**asdict(self), "passages": passages}, indent=1) + "\n"


def read_recipe(folder: Path) -> tuple[Recipe, int]:
    """Returns the recipe and the number of passages of an index folder.

    Raises:
        UserError: There is no index.json, the file is malformed or names an unknown method, or its format version
            differs.
    """
    file = folder / "index.json"
    if not file.exists():
        raise UserError("it holds no index.json", key="--index", value=folder, fix=BUILD)
    record = read_json(file, BUILD)
    try:
        passages = int(record.pop("passages"))
        recipe = Recipe(**{**record, "methods": tuple(record["methods"])})
        valid = bool(recipe.methods) and set(recipe.methods) <= set(METHODS)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"index.json is malformed ({error!r})", key="--index", value=folder, fix=BUILD) from error
    if recipe.form != FORM or not valid:
        raise UserError(
            f"the index has format version {shown(recipe.form)}, this program reads {FORM}",
            key="--index",
            value=folder,
            fix=BUILD,
        )
    return recipe, passages


def embedder(recipe: Recipe, device: str, threads: int | None) -> Embedder:
    """Loads and returns the embedding model of a recipe.

    Args:
        recipe: Names the model, its prefixes and its data type.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads; None keeps torch's default.

    Raises:
        UserError: There is no such model, or it is not supported.
    """
    folder = model_folder(recipe.model)
    return Embedder(folder, recipe.query_prefix, recipe.passage_prefix, device, threads, recipe.dtype)


class Index:
    """An index folder opened for searches. Not thread-safe.

    Args:
        folder: Written by `skyrl_mega.retriever.build`.
        device: Device for embedding queries: `auto`, `cpu` or `cuda`.
        threads: CPU threads of the embedding model and of FAISS; None keeps the defaults.
        faiss_search: FAISS's search parameters, such as `efSearch=128`.

    Raises:
        UserError: There is no index, a file is damaged, or the embedding model is missing.
    """

    def __init__(self, folder: Path, device: str = "auto", threads: int | None = None, faiss_search: str = "") -> None:
        self.recipe, self.size = read_recipe(folder)
        self.methods = self.recipe.methods
        check_folder(folder, AGAIN)
        file = folder / "passages.arrow"
        with _readable(file):
            self.passages = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        self._same(file, len(self.passages))
        if "dense" in self.methods:
            from skyrl_mega.retriever.dense import DenseIndex

            file = folder / "dense.faiss"
            with _readable(file):
                self.dense = DenseIndex(file, faiss_search, threads)
            self._same(file, self.dense.index.ntotal)
            self.embedder = embedder(self.recipe, device, threads)
            if self.dense.index.d != self.embedder.dimension:
                raise UserError(
                    f"its vectors have {self.dense.index.d} numbers, those of {self.recipe.model} "
                    f"have {self.embedder.dimension}",
                    key=file,
                    fix=AGAIN,
                )
        if "bm25" in self.methods:
            from skyrl_mega.retriever.lexical import Bm25Index, damaged

            check_folder(folder / "bm25", AGAIN)
            try:
                self.bm25 = Bm25Index(folder / "bm25")
            except Exception as error:  # bm25s, numpy and JSON raise many kinds of errors for bad files
                raise UserError(
                    f"cannot be read ({_first_line(error)})", key=damaged(folder / "bm25"), fix=AGAIN
                ) from error
            self._same(folder / "bm25", self.bm25.size)

    def search(self, queries: Sequence[str], topk: int, method: str | None = None) -> list[list[Hit]]:
        """Returns the best passages of each query, best first: `topk`, or fewer if the index has fewer. BM25 leaves out
        passages without a word of the query, so a query may have none. [] without queries.

        Args:
            queries: Texts.
            topk: At least 1.
            method: An element of `self.methods`; None means the first.
        """
        if not queries:
            return []
        topk = min(topk, self.size)
        if (method or self.methods[0]) == "dense":
            scores, rows = self.dense.search(self.embedder.queries(queries), topk)
        else:
            scores, rows = self.bm25.search(queries, topk)
        return self._hits(scores, rows)

    def _same(self, file: Path, count: int) -> None:
        if count != self.size:
            raise UserError(f"it holds {count} passages, index.json says {self.size}", key=file, fix=AGAIN)

    def _hits(self, scores: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]) -> list[list[Hit]]:
        filled = rows >= 0
        unique_rows, inverse = np.unique(rows[filled], return_inverse=True)
        texts = self.passages.take(pa.array(unique_rows))
        ids, contents = texts["id"].to_pylist(), texts["contents"].to_pylist()
        hits = iter([Hit(ids[w], contents[w], s) for w, s in zip(inverse, scores[filled].tolist(), strict=True)])
        return [[next(hits) for _ in range(count)] for count in filled.sum(axis=1).tolist()]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, MemoryError, ValueError) as error:  # ValueError includes pyarrow's errors
        raise UserError(f"cannot be read ({_first_line(error)})", key=file, fix=AGAIN) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
