"""The process behind the live page: start, end, and a busy port."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import TelemetryConfig
from skyrl_mega.report.live import process
from skyrl_mega.report.live.process import bound, live_page
from skyrl_mega.telemetry.console import Console
from tests.report.cases import metrics, run_folder

PATIENCE_S = 120.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / "r")
    (folder / "logs").mkdir()
    metrics(folder, [{"step": 1, "reward/mean": 0.25}])
    return folder


@pytest.fixture
def console(run: Path) -> Iterator[Console]:
    with Console(out=StringIO()) as console:
        console.log_to(run / "logs" / "run.log")
        yield console


def answered(url: str, token: str) -> httpx.Response:
    """Returns the page, once the process serves it."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            reply = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=PATIENCE_S)
            if reply.status_code != 503:
                return reply
        except httpx.TransportError:
            assert time.monotonic() < end
        time.sleep(0.1)


def closed(url: str) -> bool:
    """Returns True once nothing listens any more."""
    end = time.monotonic() + PATIENCE_S
    host, port = url.removeprefix("http://").split(":")
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))):
                return True
        time.sleep(0.1)
    return False


def url_in(log: Path) -> str:
    match = re.search(r"live page: (http://127\.0\.0\.1:\d+), with the token in ", log.read_text())
    assert match
    return match[1]


def test_it_is_served_during_the_run_only(run: Path, console: Console) -> None:
    with live_page(TelemetryConfig(page=0), run, console):
        url, token = url_in(run / "logs" / "run.log"), (run / "page.token").read_text()
        assert "0.250" in answered(url, token).text
        assert httpx.get(url, trust_env=False).status_code == 401
    assert closed(url)
    assert not any(token in file.read_text() for file in (run / "logs").iterdir())


def test_a_busy_port_is_a_note(run: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BIND_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with live_page(TelemetryConfig(page=port), run, console):
            pass
    line = (run / "logs" / "run.log").read_text()
    assert f"note: no live page: telemetry.page = {port}: Address already in use on 127.0.0.1; give a free port" in line


@pytest.mark.parametrize("host", ["203.0.113.9", "no.such.name.invalid"])
def test_an_address_of_another_machine_is_refused_by_its_setting(host: str) -> None:
    with pytest.raises(UserError, match=f"^telemetry.page_host = {host}: this machine has no such address"):
        bound(host, 0)
    with pytest.raises(UserError, match=f"^--host {host}: this machine has no such address"):
        bound(host, 0, keys=("--host", "--serve"))


def test_it_ends_with_a_killed_driver(run: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from skyrl_mega.config.schema import TelemetryConfig\n"
        "from skyrl_mega.report.live.process import live_page\n"
        "from skyrl_mega.telemetry.console import Console\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with Console() as console, live_page(TelemetryConfig(page=0), folder, console):\n"
        "    console.log_to(folder / 'logs' / 'run.log')\n"
        "    sys.stdin.read(1)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdin and driver.stdout
        line = driver.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        token = (run / "page.token").read_text()
        assert url and token not in line, "a pipe is no terminal"
        assert answered(url[0], token).status_code == 200
        driver.stdin.write("\n")
    assert driver.returncode == -9 and closed(url[0])
