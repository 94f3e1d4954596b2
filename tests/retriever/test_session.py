"""A run's own service: started with the run, restarted after a fault, ended with the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.retriever.client import TOKEN_VARIABLE, RetrievalError, SearchClient
from skyrl_mega.retriever.session import running_service
from tests.envs.processes import owner, wait_until


def own(index: Path, **more: str) -> EnvironmentConfig:
    return EnvironmentConfig(retriever=RetrieverConfig(index=str(index), **more))  # type: ignore[arg-type]


def pid_of(url: str) -> int:
    """Returns the process listening on the port of `url`."""
    port = f"{int(url.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = [f[9] for f in lines if f[1].endswith(f":{port}") and f[3] == "0A"]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) == f"socket:[{inode}]" for fd in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"nobody listens on {url}")


def token() -> str:
    """Returns the token of a run's own service, required from every client."""
    return os.environ[TOKEN_VARIABLE]


def gone(url: str) -> bool:
    """Waits until nothing answers at an address."""

    def silent() -> bool:
        try:
            SearchClient(url, timeout_s=0.3).health()
        except RetrievalError:
            return True
        return False

    return wait_until(silent)


def test_it_is_built_served_and_ended(corpus: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    config = own(tmp_path / "index", build=f"--corpus {corpus} --methods bm25", serve="--topk 2")
    for _ in range(2):
        with running_service(config, tmp_path / "logs", lines.append) as given:
            assert given == replace(config, retriever=replace(config.retriever, url=given.retriever.url))
            url = given.retriever.url
            assert url is not None and len(SearchClient(url, token()).search(["capital of Hungary"])[0]) == 2
            with pytest.raises(RetrievalError, match="a bearer token is needed"):
                SearchClient(url).search(["capital of Hungary"])
        assert gone(url)
    assert "164 passages" in lines[-2] and lines[-1].endswith("up to date")
    assert "ready, 164 passages" in (tmp_path / "logs" / "retriever.log").read_text()


def test_with_an_address_or_without_an_index_nothing_is_started(tmp_path: Path) -> None:
    for config in (EnvironmentConfig(), EnvironmentConfig(retriever=RetrieverConfig(url="http://far", index="x"))):
        with running_service(config, tmp_path / "logs") as given:
            assert given == config
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "config, said",
    [
        (own(Path("absent")), "holds no index.json"),
        (own(Path("absent"), build="--corpus absent.jsonl"), "environment.retriever.build: --corpus absent.jsonl"),
        (own(Path("absent"), build="--korpus x"), "environment.retriever.build: "),
    ],
)
def test_what_cannot_be_served_is_said(config: EnvironmentConfig, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, running_service(config, tmp_path / "logs"):
        pass
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_no_request_is_lost_when_it_is_killed(bm25_index: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    with running_service(own(bm25_index), tmp_path / "logs", lines.append) as given, ThreadPoolExecutor(8) as threads:
        url = given.retriever.url
        assert url is not None
        client, end, enough = SearchClient(url, token(), timeout_s=240), time.monotonic() + 240, threading.Event()
        answered = [0] * 8

        def ask(i: int) -> None:
            while not enough.is_set():
                assert client.search(["Budapest capital"], 1)[0][0].contents.startswith('"Budapest"')
                answered[i] += 1
                time.sleep(0.01)

        def more() -> None:
            """Waits until each client received three more answers."""
            before = list(answered)
            while any(count < earlier + 3 for count, earlier in zip(answered, before, strict=True)):
                assert time.monotonic() < end and not any(asked.done() for asked in asking)
                time.sleep(0.02)

        asking = [threads.submit(ask, i) for i in range(8)]
        try:
            more()
            first = pid_of(url)
            os.kill(first, signal.SIGKILL)
            more()
        finally:
            enough.set()
        for asked in asking:
            asked.result()
        assert client.search(["capital of Hungary"], 1)[0] and pid_of(url) != first
        client.close()
    assert lines == ["retriever: ended (-9); restarting it"]
    assert gone(url)


def test_it_ends_with_a_run_that_is_killed(bm25_index: Path, tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.retriever.session import running_service
config = EnvironmentConfig(retriever=RetrieverConfig(index={str(bm25_index)!r}))
with running_service(config, Path({str(tmp_path)!r})) as given:
    print(given.retriever.url, flush=True)
    time.sleep(600)
"""
    with owner(code) as (_, url):
        assert SearchClient(url).health()["ready"]
    assert gone(url)
