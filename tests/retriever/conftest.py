"""Indexes shared by the tests of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.retriever.build import build
from skyrl_mega.retriever.embedder import model_folder
from tests.retriever.services import Running, running, write_corpus

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a corpus of 164 passages from the project's own facts."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Returns the directory of the real embedding model."""
    try:
        return model_folder("minilm")
    except UserError as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="session")
def bm25_index(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an index without an embedding model: the service starts in a second."""
    folder = tmp_path_factory.mktemp("bm25") / "index"
    assert build(corpus, folder, methods=("bm25",))
    return folder


@pytest.fixture(scope="session")
def index(corpus: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an index with both search methods."""
    folder = tmp_path_factory.mktemp("both") / "index"
    assert build(corpus, folder, threads=1)
    return folder


@pytest.fixture(scope="module")
def service(bm25_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yields a BM25 service on loopback, without a token."""
    with running(bm25_index, tmp_path_factory.mktemp("service")) as up:
        yield up
