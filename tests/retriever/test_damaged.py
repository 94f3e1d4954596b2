"""Indexes with a damaged file, corpora without a word, and passages with control characters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.retriever import commands
from skyrl_mega.retriever.build import build
from skyrl_mega.retriever.client import Hit, SearchClient
from skyrl_mega.retriever.index import Index
from tests.retriever.services import ROOT

FILES = [
    "passages.arrow",
    "dense.faiss",
    "bm25/params.index.json",
    "bm25/vocab.index.json",
    "bm25/data.csc.index.npy",
    "bm25/indices.csc.index.npy",
    "bm25/indptr.csc.index.npy",
]


def damage(file: Path, how: str) -> None:
    """Makes a file empty, garbage, half, missing, or irregular."""
    content = file.read_bytes()
    file.unlink()
    if how == "fifo":
        os.mkfifo(file)
    elif how != "gone":
        file.write_bytes({"empty": b"", "garbage": b"\x93garbage" * 500, "half": content[: len(content) // 2]}[how])


@pytest.mark.parametrize("how", ["empty", "garbage", "half", "gone", "fifo"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(index: Path, tmp_path: Path, name: str, how: str) -> None:
    shutil.copytree(index, tmp_path / "index")
    damage(tmp_path / "index" / name, how)
    with pytest.raises(UserError) as caught:
        Index(tmp_path / "index", threads=1)
    assert str(caught.value).startswith(f"{tmp_path / 'index' / name}: ") and "build the index again" in str(
        caught.value
    )


@pytest.mark.parametrize("name", ["passages.arrow", "bm25"])
def test_a_file_of_another_index_is_named(bm25_index: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(bm25_index, tmp_path / "index")
    (tmp_path / "c.jsonl").write_text('{"id": 0, "title": "Danube", "text": "It is a river."}')
    build(tmp_path / "c.jsonl", tmp_path / "small", methods=("bm25",))
    copy = shutil.copytree if name == "bm25" else shutil.copyfile
    shutil.rmtree(tmp_path / "index" / name, ignore_errors=True)
    copy(tmp_path / "small" / name, tmp_path / "index" / name)
    with pytest.raises(UserError, match=rf"index/{name}: it holds 1 passages, index\.json says 164"):
        Index(tmp_path / "index")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"passages": "many", "methods": ["bm25"]}', '{"corpus": "c", "passages": 1, "methods": ["x"]}'],
)
def test_a_damaged_recipe_is_named(bm25_index: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(bm25_index, tmp_path / "index")
    (tmp_path / "index" / "index.json").write_text(content)
    with pytest.raises(UserError, match=r"index(\.json)?:? "):
        Index(tmp_path / "index")


def test_the_commands_end_with_one_line_and_2(bm25_index: Path, tmp_path: Path) -> None:
    shutil.copytree(bm25_index, tmp_path / "index")
    damage(tmp_path / "index" / "bm25" / "vocab.index.json", "empty")
    (tmp_path / "c.jsonl").write_text('{"id": 0, "title": "a", "text": "I, the x"}')
    serve = ["serve", "--index", str(tmp_path / "index"), "--port", "0"]
    make = ["build", "--corpus", str(tmp_path / "c.jsonl"), "--output", str(tmp_path / "new"), "--methods", "bm25"]
    for arguments, message in ((serve, "bm25/vocab.index.json: cannot be read"), (make, "has a word that BM25 keeps")):
        command = [sys.executable, "-m", "skyrl_mega.retriever", *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        lines = [line for line in ended.stderr.splitlines() if not line.startswith("BM25 over")]
        assert ended.returncode == 2 and len(lines) == 1 and message in lines[0], ended
    assert not (tmp_path / "new").exists()


def test_no_passage_steers_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hit = Hit("\x1b[2J1", "title\x1b]0;mine\x07\ntext\x9b1m\u202e", 0.5)
    monkeypatch.setattr(SearchClient, "search", lambda *_: [[hit]])
    commands.main(["query", "what\x1b[31m"])
    out = capsys.readouterr().out
    assert (
        all(line.isprintable() for line in out.splitlines()) and r"\x1b[2J1" in out and r"\x1b]0;mine\x07 text" in out
    )
