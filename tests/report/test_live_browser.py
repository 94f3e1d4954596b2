"""The live page in a real browser, if installed: follows a run, its end and its resume."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_mega.report.live import server
from skyrl_mega.report.live.process import bound
from skyrl_mega.report.live.snapshot import Follower
from tests.report import browser as chromium
from tests.report.browser import Browser
from tests.report.cases import EVIL, events, metrics, run_folder

if chromium.program() is None:
    pytest.skip(f"no browser: none of {', '.join(chromium.NAMES)} is installed", allow_module_level=True)

TOKEN = "t" * 43


@contextmanager
def served(run: Path, port: int = 0) -> Iterator[int]:
    """Serves a run in a thread and yields the port."""
    ending = threading.Event()
    with bound("127.0.0.1", port, 60.0) as listening:
        follower = Follower(run, lambda: not ending.is_set())
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(listening, follower, TOKEN, ending)))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            ending.set()
            thread.join()


def rows(run: Path, steps: int) -> None:
    metrics(run, [{"step": s, "reward/mean": s / 10, "time/step": 2.0, "time/train": 1.5} for s in range(1, steps + 1)])


def test_it_follows_a_run(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(server, "VIEWER_S", 0.0)
    run = run_folder(tmp_path / "r")
    rows(run, 2)
    with served(run) as port:
        browser.errors.clear()
        browser.visit(f"http://127.0.0.1:{port}/?token={TOKEN}")
        browser.until("document.querySelector('.live p')?.textContent.includes('step 2 of 4')")
        assert browser.value("location.href") == f"http://127.0.0.1:{port}/" and TOKEN not in browser.value(
            "document.cookie"
        )
        browser.value("(() => { window.same = 1; scrollTo(0, 200); })()")
        rows(run, 3)
        events(run, {"kind": "health", "step": 3, "finding": "equal_rewards", "evidence": EVIL, "text": EVIL})
        browser.until(
            "document.querySelector('.live .alarm.warn') && document.querySelector('.tile b').textContent === '3 of 4'"
        )
        assert browser.value("document.querySelector('.live .alarm').textContent.includes('<script>')"), "text, no HTML"
        assert browser.value("document.title") == "(1 ⚠) r"
        assert browser.value("window.same === 1 && scrollY === 200 && window.pwned === undefined"), "replaced in place"
        box = "document.querySelector('svg').getBoundingClientRect()"
        browser.point(*browser.value(f"(() => {{ const r = {box}; return [r.right - 12, r.y + r.height / 2]; }})()"))
        browser.until("document.querySelector('.hint b')?.textContent === 'step 3'")
        assert browser.errors == []
    browser.until("document.querySelector('.live').textContent.includes('No answer since')")
    rows(run, 4)
    with served(run, port):
        browser.until("document.querySelector('.tile b').textContent === '4 of 4'")
        browser.until("!document.querySelector('.live').textContent.includes('No answer')")
        assert browser.value("window.same === 1")
    assert all(url.startswith((f"http://127.0.0.1:{port}/", "about:blank")) for url in browser.requests), json.dumps(
        browser.requests
    )
