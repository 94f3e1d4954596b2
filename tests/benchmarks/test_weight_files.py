"""A small part of benchmarks/weight_files.py: kills of writers and readers, and ranges over HTTP."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks import weight_files
from skyrl_mega.weights.files.store import Absent, open_store


@pytest.mark.nightly
def test_no_bit_differs_after_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "STEPS", 15)
    monkeypatch.setattr(weight_files, "KILLS", 8)
    counts = weight_files.kills()
    assert counts["compared"] == 15 * 6 and counts["different"] == 0
    assert counts["writers_killed"] + counts["readers_killed"] >= 4


def test_a_store_over_http_gives_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "DELAY_MS", 0)
    monkeypatch.setattr("skyrl_mega.weights.files.store.PAUSE_S", 0.001)
    monkeypatch.setattr(weight_files.Ranges, "folder", tmp_path)
    (tmp_path / "a").write_bytes(bytes(range(100)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), weight_files.Ranges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store = open_store(f"http://127.0.0.1:{server.server_port}")
        assert store.read("a", 10, 5) == bytes(range(10, 15))
        assert store.read("a") == bytes(range(100))
        with pytest.raises(Absent):
            store.read("b")
        with pytest.raises(Absent, match="from byte 90 on"):
            store.read("a", 90, 20)
    finally:
        server.shutdown()
        server.server_close()
