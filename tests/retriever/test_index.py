"""Search results against brute force, and the building of an index."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.retriever.build import build
from skyrl_mega.retriever.corpus import read_passages
from skyrl_mega.retriever.dense import DenseBuilder, DenseIndex
from skyrl_mega.retriever.index import Index, read_recipe
from skyrl_mega.retriever.lexical import K1, B, Bm25Index

QUERIES = [
    "Which city is the capital of Hungary?",
    "the river that flows through Paris",
    "money used in Thailand",
    "What language do people speak in Iceland?",
]


def plain_embeddings(folder: Path, texts: list[str]) -> np.ndarray:
    """Embeds each text alone, without padding: mean of the last hidden states, scaled to length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


def test_dense_search_is_the_exact_nearest_neighbour(index: Path, corpus: Path, minilm: Path) -> None:
    passages = list(read_passages(corpus))
    scores = plain_embeddings(minilm, QUERIES) @ plain_embeddings(minilm, [p.contents for p in passages]).T
    results = Index(index, threads=1).search(QUERIES, 5)
    for row, hits in zip(scores, results, strict=True):
        best = np.argsort(-row)[:5]
        assert [hit.id for hit in hits] == [passages[i].id for i in best]
        np.testing.assert_allclose([hit.score for hit in hits], row[best], atol=1e-5)
        assert hits[0].contents == passages[best[0]].contents
    assert results[0][0].contents.startswith('"Budapest"\n') and results[1][0].contents.startswith('"Seine River"\n')


@pytest.mark.parametrize("factory, parameters, least", [("Flat", "", 1.0), ("HNSW32", "efSearch=128", 0.95)])
def test_recall_against_exact_search(tmp_path: Path, factory: str, parameters: str, least: float) -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(200, 48))
    vectors = (centres[random.integers(200, size=8000)] + 0.6 * random.normal(size=(8000, 48))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:200] + 0.05 * random.normal(size=(200, 48)).astype(np.float32)
    builder = DenseBuilder(48, factory)
    for chunk in np.array_split(vectors, 7):
        builder.add(chunk)
    builder.save(tmp_path / "dense.faiss")
    _, rows = DenseIndex(tmp_path / "dense.faiss", parameters).search(queries, 10)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows.tolist(), exact.tolist(), strict=True)])
    assert recall >= least


def test_an_index_that_learns_from_its_vectors(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(500, 16)).astype(np.float32)
    builder = DenseBuilder(16, "IVF4,Flat")
    builder.add(vectors[:300])
    builder.add(vectors[300:])
    builder.save(tmp_path / "dense.faiss")
    _, rows = DenseIndex(tmp_path / "dense.faiss", "nprobe=4").search(vectors, 1)
    assert (rows[:, 0] == np.argmax(vectors @ vectors.T, axis=1)).all()
    small = DenseBuilder(16, "IVF64,Flat")
    small.add(vectors[:3])
    with pytest.raises(UserError, match="--faiss IVF64,Flat: 3 passages are too few"):
        small.save(tmp_path / "small.faiss")


def brute_bm25(texts: list[str], query: str) -> np.ndarray:
    """Returns Lucene's BM25 scores, from the formula."""
    words = [Counter(re.findall(r"\b\w\w+\b", text.lower())) for text in texts]
    mean = sum(w.total() for w in words) / len(words)
    scores = np.zeros(len(texts))
    for word in re.findall(r"\b\w\w+\b", query.lower()):
        having = sum(word in w for w in words)
        idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for i, w in enumerate(words):
            scores[i] += idf * w[word] / (w[word] + K1 * (1 - B + B * w.total() / mean))
    return scores


def test_bm25_against_its_formula(tmp_path: Path) -> None:
    from skyrl_mega.retriever.lexical import build_bm25

    texts = ["river river danube budapest", "budapest hungary capital", "vienna danube", "forint hungary money money"]
    build_bm25(texts, tmp_path / "bm25")
    bm25 = Bm25Index(tmp_path / "bm25")
    queries = ["danube budapest", "hungary money", "river", "danube unknownword"]
    scores, rows = bm25.search(queries, 10)
    for i, query in enumerate(queries):
        exact = brute_bm25(texts, query)
        earned = rows[i] >= 0
        assert sorted(rows[i][earned]) == np.flatnonzero(exact).tolist()
        np.testing.assert_allclose(scores[i][earned], exact[rows[i][earned]], rtol=1e-5)
        assert (np.diff(scores[i][earned]) <= 0).all()
    assert (bm25.search(["nothing here knows this", ""], 3)[1] == -1).all()


def test_both_ways_and_fewer_than_asked(index: Path) -> None:
    opened = Index(index, threads=1)
    assert opened.methods == ("dense", "bm25")
    dense, bm25 = (opened.search(["Budapest"], 1000, method)[0] for method in opened.methods)
    assert len(dense) == opened.size == 164
    assert {hit.contents.partition("\n")[0] for hit in bm25} == {'"Budapest"', '"Danube River"'}
    assert opened.search([], 3) == []


def test_parquet_and_both_forms_of_a_passage_are_the_same(corpus: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    search_r1 = [{"id": int(r["id"]), "contents": f'"{r["title"]}"\n{r["text"]}'} for r in records]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, search_r1)))
    want = list(read_passages(corpus))
    assert list(read_passages(tmp_path / "c.parquet")) == list(read_passages(tmp_path / "c.jsonl")) == want


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"id": 1.5, "title": "t", "text": "x"}', "row 1, id: 1.5"),
        ('{"id": "1", "title": "t"}', "row 1, text: None"),
        ('["x"]', "row 1: it is no object"),
        ("{", "cannot be read as .jsonl"),
    ],
)
def test_a_bad_passage_is_named_and_leaves_nothing(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"id": "0", "title": "t", "text": "x"}\n' + line)
    with pytest.raises(UserError) as caught:
        build(file, tmp_path / "index", methods=("bm25",))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert [f.name for f in tmp_path.iterdir()] == ["c.jsonl"]


def test_built_once_and_again_when_the_corpus_changes(corpus: Path, tmp_path: Path) -> None:
    mine, output = tmp_path / "c.jsonl", tmp_path / "index"
    mine.write_bytes(corpus.read_bytes())
    lines: list[str] = []
    assert build(mine, output, methods=("bm25",), say=lines.append)
    assert not build(mine, output, methods=("bm25",), say=lines.append)
    assert lines[-1].endswith("up to date")
    assert build(mine, output, methods=("bm25",), limit=10, say=lines.append) and read_recipe(output)[1] == 10
    mine.write_text(mine.read_text().replace("forint", "dollar"))
    assert build(mine, output, methods=("bm25",), say=lines.append)
    assert "dollar" in Index(output).search(["Hungary currency"], 1)[0][0].contents
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.txt").write_text("mine")
    with pytest.raises(UserError, match="it holds something else"):
        build(mine, tmp_path / "thesis", methods=("bm25",))
    assert (tmp_path / "thesis" / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("mine", ["notes.md", "c.jsonl", "bm25/notes.md", "index.json"])
def test_a_folder_with_files_of_a_user_is_never_emptied(corpus: Path, tmp_path: Path, mine: str) -> None:
    output = tmp_path / "index"
    if mine != "index.json":
        assert build(corpus, output, methods=("bm25",), say=lambda _: None)
    else:
        output.mkdir()
    (output / mine).write_text('{"title": "mine"}')
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="it holds something else"):
        build(corpus, output, methods=("bm25",), limit=10)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


def test_what_is_no_index_or_no_model_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it holds no index\.json"):
        Index(tmp_path)
    with pytest.raises(UserError, match="--model absent: allowed: minilm, or a Hugging Face directory"):
        build(corpus, tmp_path / "index", model="absent")
    with pytest.raises(UserError, match="--faiss Nonsense: FAISS refuses it"):
        DenseBuilder(8, "Nonsense")
