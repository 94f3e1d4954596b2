"""Building of an index folder from a corpus, atomically, and only if the index is not up to date."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from skyrl_mega.cluster.atomic_output import atomic_folder, refuse_folder
from skyrl_mega.common.errors import UserError
from skyrl_mega.retriever.corpus import Passage, fingerprint, read_passages
from skyrl_mega.retriever.embedder import MINILM, Embedder, model_folder
from skyrl_mega.retriever.index import Recipe, embedder, read_recipe

CHUNK = 2048
"""Number of passages processed at a time."""
SAY_EVERY_S = 5.0
"""Seconds between two lines of progress."""
FILES = frozenset({"index.json", "passages.arrow", "dense.faiss", "bm25"})
"""Entries of an index folder (`retriever.index`)."""
SCHEMA = pa.schema({"id": pa.string(), "contents": pa.string()})


def build(
    corpus: Path,
    output: Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    say: Callable[[str], None] = print,
    **chosen: Any,
) -> bool:
    """Writes the index of `corpus` to the folder `output`. Keeps an index with the same recipe and replaces any other.

    Args:
        corpus: `.jsonl` or `.parquet` with id, title and text.
        output: Output folder.
        device: Device of the embedding model: `auto`, `cpu` or `cuda`.
        threads: CPU threads of the embedding model; None keeps torch's default.
        say: Receives lines about the progress.
        chosen: Fields of `Recipe` with other values than the defaults, such as `methods`; `corpus` and `form` are not
            among them.

    Returns:
        True if the index was built now; False if it was up to date.

    Raises:
        UserError: The corpus or the model is invalid, or `output` holds something else.
        OSError: `output` cannot be written.
    """
    if not corpus.is_file():
        raise UserError("no such file", key="--corpus", value=corpus)
    recipe = Recipe("", **chosen)
    if "dense" in recipe.methods and recipe.model != MINILM:
        recipe = replace(recipe, model=str(model_folder(recipe.model).absolute()))
    recipe = replace(recipe, corpus=fingerprint(corpus))  # reads the whole corpus
    if _is_index_of(output, recipe):
        say(f"{output}: up to date")
        return False
    place = f"--output {output}"
    refuse_folder(output, place, _is_an_index)  # before loading the embedding model
    with atomic_folder(output, place, _is_an_index, last="index.json") as part:
        embeds = embedder(recipe, device, threads) if "dense" in recipe.methods else None
        count = _write(read_passages(corpus), part, recipe, embeds, say)
        (part / "index.json").write_text(recipe.text(count), encoding="utf-8")
    return True


def _is_an_index(folder: Path, names: set[str]) -> bool:
    """Returns True if a folder with these entries is an index of any recipe and form, and nothing else."""
    inner = (folder / "bm25").rglob("*") if "bm25" in names else ()
    if not names <= FILES or any(path.is_dir() or ".index." not in path.name for path in inner):
        return False
    try:
        record = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.keys() >= {"corpus", "methods", "form", "passages"}


def _is_index_of(folder: Path, recipe: Recipe) -> bool:
    try:
        return read_recipe(folder)[0] == recipe
    except UserError:  # no index, or an index of another form
        return False


def _write(
    passages: Iterator[Passage], folder: Path, recipe: Recipe, embeds: Embedder | None, say: Callable[[str], None]
) -> int:
    """Writes everything except `index.json`; returns the number of passages."""
    dense = None
    if embeds:
        from skyrl_mega.retriever.dense import DenseBuilder

        dense = DenseBuilder(embeds.dimension, recipe.faiss)
    start = last_said = time.monotonic()
    count, texts = 0, []
    with pa.OSFile(str(folder / "passages.arrow"), "wb") as out, pa.ipc.new_file(out, SCHEMA) as writer:
        passages = itertools.islice(passages, recipe.limit)
        while chunk := list(itertools.islice(passages, CHUNK)):
            contents = [passage.contents for passage in chunk]
            writer.write_batch(pa.record_batch([[passage.id for passage in chunk], contents], schema=SCHEMA))
            if dense and embeds:
                dense.add(embeds.passages(contents))
            if "bm25" in recipe.methods:
                texts += contents
            count += len(chunk)
            if time.monotonic() - last_said > SAY_EVERY_S:
                last_said = time.monotonic()
                say(f"{count} passages, {count / (last_said - start):.0f} per second")
    if not count:
        raise UserError("the file has no passage", key="--corpus")
    if dense:
        dense.save(folder / "dense.faiss")
    if "bm25" in recipe.methods:
        from skyrl_mega.retriever.lexical import build_bm25

        say(f"BM25 over {count} passages")
        build_bm25(texts, folder / "bm25")
    say(f"{count} passages in {time.monotonic() - start:.0f} s")
    return count
