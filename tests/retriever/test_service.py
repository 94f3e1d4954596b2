"""The service from its clients' view, over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from skyrl_mega.retriever.client import TOKEN_VARIABLE, RetrievalError, SearchClient
from tests.retriever.services import ROOT, Running, running
from tests.support.machine import within


@pytest.fixture
def http(service: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=120) as client:
        yield client


def test_search_r1_s_request_and_answer(http: httpx.Client) -> None:
    asked = {"queries": ["Budapest capital of Hungary", "Danube"], "topk": 2, "return_scores": True}
    answer = http.post("/retrieve", json=asked).json()
    assert set(answer) == {"result"} and [len(hits) for hits in answer["result"]] == [2, 1]
    first = answer["result"][0][0]
    assert first["document"]["contents"] == '"Budapest"\nBudapest is the capital of Hungary.'
    assert set(first) == {"document", "score"} and set(first["document"]) == {"id", "contents"}
    assert first["score"] > answer["result"][0][1]["score"] > 0
    without = http.post("/retrieve", json={"queries": ["Budapest capital of Hungary"]}).json()
    assert without["result"][0][0] == first["document"] and len(without["result"][0]) == 3


def test_health(http: httpx.Client) -> None:
    reply = http.get("/health").json()
    assert reply == {"ready": True, "version": "0.1.0", "passages": 164, "methods": ["bm25"], "waiting": 0}


@pytest.mark.parametrize(
    "body, code, said",
    [
        ({"queries": "one text"}, 422, "queries"),
        ({"queries": ["x"], "topk": 0}, 422, "topk"),
        ({"queries": ["x"], "method": "dense"}, 422, "allowed: bm25"),
        ({"queries": ["x"] * 8193}, 413, "allowed: 8192 in one request"),
        ({"queries": ["x"] * 3000, "topk": 1000}, 413, "3000000 passages: allowed: 32768 in one request"),
    ],
)
def test_wrong_requests(http: httpx.Client, body: dict[str, object], code: int, said: str) -> None:
    response = http.post("/retrieve", json=body)
    assert response.status_code == code and said in response.text


@pytest.mark.parametrize(
    "body, said",
    [
        (b'{"queries": ["x"], "topk": NaN}', "topk"),
        (b'{"queries": ["\\ud800"]}', "queries"),
        (b'{"queries": ["x"], "topk": 1e999}', "topk"),
        (b'{"queries": NaN}', "queries"),
        (b'{"queries": ' + b"[" * 5000, "parsing the body"),
        (b"\xff", "body"),
    ],
)
def test_what_no_json_holds_is_refused_and_not_a_fault(http: httpx.Client, body: bytes, said: str) -> None:
    response = http.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422) and said in response.text


def test_headers_that_are_too_long_are_not_read(http: httpx.Client) -> None:
    with pytest.raises(httpx.TransportError):
        http.get("/health", headers={"X": "a" * 2**20})


def test_a_body_without_a_length_is_not_read(http: httpx.Client) -> None:
    response = http.post("/retrieve", content=iter([b'{"queries": ["x"]}']))
    assert response.status_code == 413 and "Content-Length" in response.text


def test_dense_service_batches_many_clients(index: Path, tmp_path: Path) -> None:
    with running(index, tmp_path) as up, ThreadPoolExecutor(16) as threads:
        client = SearchClient(up.url)
        cities = ["Budapest", "Paris", "Lisbon", "Hanoi"] * 8
        titles = list(threads.map(lambda city: client.search([f"{city} is the capital of"], 1)[0][0], cities))
        assert [hit.contents.partition("\n")[0].strip('"') for hit in titles] == cities
        assert client.search(["Budapest"], 1, "bm25")[0][0].score > 1
        client.close()


def test_a_token_is_asked_for(bm25_index: Path, tmp_path: Path) -> None:
    with running(bm25_index, tmp_path, "--host", "0.0.0.0", token="s3cret") as up:
        url = up.url.replace("0.0.0.0", "127.0.0.1")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            response = httpx.post(f"{url}/retrieve", json={"queries": ["x"]}, headers=headers, trust_env=False)
            assert response.status_code == 401
        assert httpx.get(f"{url}/health", trust_env=False).json()["ready"]
        with pytest.raises(RetrievalError, match=f"{url}/retrieve refused: HTTP 401"):
            SearchClient(url, "wrong").search(["Budapest"])
        assert SearchClient(url, "s3cret").search(["Budapest"])[0]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--host", "0.0.0.0"], f"other machines can reach it, so it needs a token; set {TOKEN_VARIABLE}"),
        (["--host", "example.org"], "other machines can reach it"),
        (["--index", "absent"], "holds no index.json"),
        (["--method", "dense"], "--method dense: allowed by"),
        (["--port", "70000"], "--port 70000: allowed is a whole number from 0 to 65535"),
        (["--prot", "1"], "--prot"),
    ],
)
def test_wrong_options_are_one_line(bm25_index: Path, options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "skyrl_mega.retriever", "serve", "--index", str(bm25_index), *options]
    env = {**os.environ, TOKEN_VARIABLE: ""}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_ready_file_of_a_user_is_not_written_over(bm25_index: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"url": "mine"}')
    options = ["--index", str(bm25_index), "--ready-file", str(file)]
    command = [sys.executable, "-m", "skyrl_mega.retriever", "serve", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 2 and "settings.json was not written by this command" in result.stderr
    assert file.read_text() == '{"url": "mine"}'


def test_a_port_in_use_is_named(bm25_index: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "skyrl_mega.retriever", "serve", "--index", str(bm25_index), "--port", port]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 2 and f"--port {port}: Address already in use" in result.stderr


def test_a_full_queue_says_when_to_come_back_and_the_client_does(bm25_index: Path, tmp_path: Path) -> None:
    with running(bm25_index, tmp_path, "--waiting", "4", "--batch", "1", "--wait-ms", "0") as up:
        body = {"queries": ["capital of Hungary"] * 4, "topk": 1}
        with ThreadPoolExecutor(24) as threads, httpx.Client(trust_env=False, timeout=120) as http:
            replies = list(threads.map(lambda _: http.post(f"{up.url}/retrieve", json=body), range(200)))
            turned_away = [r for r in replies if r.status_code == 503]
            assert turned_away and all(r.headers["Retry-After"] == "1" for r in turned_away)
            assert all(len(r.json()["result"]) == 4 for r in replies if r.status_code != 503)
            client = SearchClient(up.url, timeout_s=240)
            results = list(threads.map(lambda _: client.search(body["queries"], 1), range(48)))
        assert all(len(hits) == 4 for hits in results)


def test_what_it_has_taken_is_answered_when_it_is_told_to_stop(bm25_index: Path, tmp_path: Path) -> None:
    with running(bm25_index, tmp_path, "--batch", "1") as up:
        body = {"queries": ["capital of Hungary"] * 2000, "topk": 1}
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(httpx.post, f"{up.url}/retrieve", json=body, timeout=240, trust_env=False)
            end = time.monotonic() + 120
            while not httpx.get(f"{up.url}/health", timeout=120, trust_env=False).json()["waiting"]:
                assert time.monotonic() < end and not reply.done(), "it was never seen at work"
            up.process.send_signal(signal.SIGTERM)
            assert len(reply.result().json()["result"]) == 2000
        assert up.process.wait(120) == 0 and not up.ready_file.exists()


def test_a_steady_load(service: Running) -> None:
    """Sends 25 requests a second for 4 s, each at its time even if earlier requests are unanswered."""
    rate, seconds = 25, 4
    client, start = SearchClient(service.url), time.monotonic() + 0.1

    def ask(i: int) -> float:
        due = start + i / rate
        time.sleep(max(due - time.monotonic(), 0))
        assert len(client.search([f"capital of country {i}"], 3)[0]) == 3
        return time.monotonic() - due

    with ThreadPoolExecutor(32) as threads:
        latencies = list(threads.map(ask, range(rate * seconds)))
    assert len(latencies) == 100 and within(float(np.percentile(latencies, 50)), 2.0)
