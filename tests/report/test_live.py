"""The live page: access, replies, state, alarms and metrics."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import TelemetryConfig
from skyrl_mega.report import overview, run_data
from skyrl_mega.report.live import foreground, prometheus, server
from skyrl_mega.report.live.access import FILE, Allowance, Guard, token_of
from skyrl_mega.report.live.server import LivePage
from skyrl_mega.report.live.snapshot import Follower
from skyrl_mega.report.live.state import START_SILENT_S, state_of
from tests.report.cases import BEGAN, EVIL, events, metrics, run_folder

TOKEN = "t" * 43
ROWS: list[dict[str, float | None]] = [
    {"step": 0, "eval/a/mean": 0.5},
    {"step": 1, "reward/mean": 0.25, "time/step": 10.0, "health/equal_rewards": 1.0, "health/stuck_steps": 1.0},
    {"step": 2, "reward/mean": 0.5, "time/step": 30.0, "policy/loss": None, "health/stuck_steps": 0.0},
]
FINDING = {"kind": "health", "step": 1, "finding": "equal_rewards", "evidence": f"equal {EVIL}"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = run_folder(tmp_path / 'a "b"')
    metrics(folder, ROWS)
    events(folder, {"kind": "step", "step": 1}, FINDING, {"kind": "step", "step": 2})
    os.utime(folder / "config.yaml", (BEGAN, BEGAN))
    return folder


def app_of(run: Path) -> LivePage:
    follower = Follower(run, lambda: True)
    follower.look()
    return LivePage(follower, Guard(TOKEN, 8265))


def replies(app: LivePage, *requests: tuple[str, str, dict[str, str]]) -> list[httpx.Response]:
    """Returns the replies to requests (method, path, headers), one after the other."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://x", follow_redirects=False) as http:
            replies = []
            for method, path, headers in requests:
                http.cookies.clear()
                replies.append(await http.request(method, path, headers=headers))
            return replies

    return asyncio.run(send())


BEARER = {"Authorization": f"Bearer {TOKEN}"}
COOKIE = {"Cookie": f"other=1; skyrl_mega_page_8265={TOKEN}"}


@pytest.mark.parametrize("path", ["/", "/state.json", "/metrics", "/else"])
def test_nothing_is_shown_without_the_token(run: Path, path: str) -> None:
    near = TOKEN[:-1] + "u"
    wrong = [
        ("GET", path, {}),
        ("GET", path, {"Authorization": f"Bearer {near}"}),
        ("GET", path, {"Authorization": f"Basic {TOKEN}"}),
        ("GET", path, {"Cookie": f"skyrl_mega_page_8265={near}; skyrl_mega_page_1={TOKEN}"}),
        ("GET", f"{path}?token={near}", {}),
        ("GET", f"{path}?token=\u00ff", {}),
        ("GET", f"{path}?{'token=&' * 20}", {}),
    ]
    bodies = replies(app_of(run), *wrong)
    assert {reply.status_code for reply in bodies} == {401}
    assert not any("reward" in reply.text or TOKEN in reply.text for reply in bodies)


def test_the_token_moves_from_the_address_into_a_cookie(run: Path) -> None:
    [moved, page, state] = replies(
        app_of(run), ("GET", f"/?token={TOKEN}", {}), ("GET", "/", COOKIE), ("GET", "/state.json", BEARER)
    )
    assert moved.status_code == 303 and moved.headers["location"] == "/"
    assert moved.headers["set-cookie"] == f"skyrl_mega_page_8265={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert page.status_code == state.status_code == 200
    assert TOKEN not in page.text + state.text
    for reply in (moved, page, state):
        assert reply.headers["cache-control"] == "no-store" and reply.headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]


def test_the_page_is_the_report(run: Path) -> None:
    app = app_of(run)
    [state, page, plain] = replies(
        app,
        ("GET", "/state.json", COOKIE),
        ("GET", "/", COOKIE),
        ("GET", "/", {**COOKIE, "Accept-Encoding": "identity"}),
    )
    assert page.headers["content-encoding"] == "gzip" and page.text == plain.text
    expected = overview.page([run_data.read(run)], live=state.json()["version"])
    assert page.text == expected and "connect-src 'self'" in expected and EVIL not in expected
    assert "connect-src" not in overview.page([run_data.read(run)]), "a page in a file sends nothing"


def test_other_requests(run: Path) -> None:
    statuses = [
        reply.status_code
        for reply in replies(
            app_of(run),
            ("GET", "/../config.yaml", COOKIE),
            ("GET", "/state", COOKIE),
            ("POST", "/", COOKIE),
            ("HEAD", "/", COOKIE),
        )
    ]
    assert statuses == [404, 404, 405, 200]


def test_strangers_do_not_use_up_the_requests_of_viewers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAIT_S", 0.0)
    app = app_of(run)
    app.allowed, app.allowed_strangers = Allowance(0.0, 3), Allowance(0.0, 2)
    strange = replies(app, *[("GET", "/", {})] * 4)
    assert [reply.status_code for reply in strange] == [401, 401, 429, 429]
    assert strange[-1].headers["retry-after"] == "1"
    assert [reply.status_code for reply in replies(app, *[("GET", "/", BEARER)] * 4)] == [200, 200, 200, 429]


def test_an_allowance_fills_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowance = Allowance(rate=2.0, burst=3.0)
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
    now[0] += 1.0
    assert [allowance.take() for _ in range(3)] == [True, True, False]
    now[0] += 1000.0
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]


def test_the_token_is_kept_for_the_owner(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600 and (tmp_path / FILE).read_text() == token
    assert token_of(tmp_path) == token, "a resumed run keeps it"
    (tmp_path / FILE).chmod(0o644)
    assert token_of(tmp_path) != token, "others could have read it"
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_file_of_the_user_is_no_token(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("mine")
    with pytest.raises(UserError, match="not a token"):
        token_of(tmp_path)
    assert (tmp_path / FILE).read_text() == "mine"
    (tmp_path / FILE).unlink()
    (tmp_path / "far").write_text("t" * 43)
    (tmp_path / FILE).symlink_to(tmp_path / "far")
    with pytest.raises(UserError, match="cannot be used"):
        token_of(tmp_path)


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Returns (name, last label) → value of each sample, read by Prometheus' parser."""
    return {
        (
            sample.name,
            sample.labels.get("metric") or sample.labels.get("finding") or sample.labels.get("kind") or "",
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.labels["run"] == 'a "b"'
    }


def test_prometheus_reads_the_newest_step(run: Path) -> None:
    [reply] = replies(app_of(run), ("GET", "/metrics", BEARER))
    assert reply.headers["content-type"].startswith("text/plain; version=")
    values = samples(reply.content)
    assert values["skyrl_mega_step", ""] == 2 and values["skyrl_mega_planned_steps", ""] == 4
    assert values["skyrl_mega_running", ""] == 1 and values["skyrl_mega_last_step_timestamp_seconds", ""] == BEGAN + 2
    assert values["skyrl_mega_events_total", "step"] == 2 and values["skyrl_mega_events_total", "health"] == 1
    assert values["skyrl_mega_alarm", "equal_rewards"] == 0 and values["skyrl_mega_alarm", "fault"] == 0
    assert math.isnan(values.pop(("skyrl_mega_policy_loss", "policy/loss")))
    newest = {
        name: value
        for name, value in {**ROWS[0], **ROWS[2]}.items()
        if name not in ("step", "policy/loss") and value is not None
    }
    assert {label: value for (_, label), value in values.items() if "/" in label} == newest


def test_metrics_with_the_same_letters_stay_apart(run: Path) -> None:
    metrics(run, [{"step": 1, "eval/a/b": 1.0, "eval/a_b": 2.0, "reward/of/ü{}": 3.0, "health/equal_rewards": 1.0}])
    data = run_data.read(run)
    values = samples(prometheus.text(data, state_of(data, running=False)))
    assert values["skyrl_mega_eval_a_b", "eval/a/b"] == 1 and values["skyrl_mega_eval_a_b", "eval/a_b"] == 2
    assert values["skyrl_mega_reward_of____", "reward/of/ü{}"] == 3
    assert values["skyrl_mega_alarm", "equal_rewards"] == 1 and values["skyrl_mega_running", ""] == 0


def test_state_and_alarms_follow_the_run(run: Path) -> None:
    def now(seconds: float = 3.0, running: bool = True) -> dict[str, Any]:
        return state_of(run_data.read(run), running).at(BEGAN + seconds)

    state = now()
    assert (state["step"], state["planned"], state["phase"], state["age_s"]) == (2, 4, "training", 1.0)
    assert state["usual_s"] == 20.0
    [alarm] = state["alarms"]
    assert alarm == {"kind": "equal_rewards", "text": f"equal {EVIL}", "level": "past", "steps": (1, 1)}
    assert [alarm["kind"] for alarm in now(2 + 119)["alarms"]] == ["equal_rewards"]
    assert [alarm["kind"] for alarm in now(2 + 121)["alarms"]] == ["silent", "equal_rewards"]
    assert [alarm["kind"] for alarm in now(9999, running=False)["alarms"]] == ["equal_rewards"]
    assert now(9999, running=False)["phase"] == "ended"

    metrics(run, [*ROWS, {"step": 3, "time/step": 100.0, "health/equal_rewards": 1.0}])
    assert now(200)["alarms"] == [alarm | {"level": "warn", "steps": (1, 3)}], "a step may take three times the longest"
    metrics(run, [*ROWS, {"step": 11, "time/step": 10.0}])
    assert now()["alarms"] == []

    started = [{"kind": "step", "step": 1}, {"kind": "fault", "text": "fault: policy-3 died\nof hunger"}]
    events(run, *started)
    assert now()["phase"] == "fault" and now(9999, running=False)["phase"] == "fault"
    assert now()["alarms"][0] == {"kind": "fault", "text": "policy-3 died", "level": "bad", "steps": None}
    events(run, *started, {"kind": "restart", "text": "restarting"})
    assert now()["phase"] == "restarting" and now()["alarms"] == []
    events(run, *started, {"kind": "resumed", "text": "resuming after step 1", "step": 1})
    assert now()["phase"] == "starting" and now()["stage"] == "resuming after step 1"

    down = {"kind": "retriever_lost", "restarted": False, "text": "retriever: stays down"}
    events(run, {"kind": "step", "step": 1}, down)
    assert now()["alarms"][0]["text"] == "retriever: stays down"
    lost = {"kind": "actor_given_up", "actor": "engine-1", "text": "engine-1 crashed"}
    events(run, {"kind": "step", "step": 1}, lost)
    assert now()["alarms"][0] == {"kind": "actor_given_up", "text": "engine-1 crashed", "level": "bad", "steps": None}
    events(run, lost, {"kind": "actor_back", "actor": "engine-1"}, {"kind": "step", "step": 1})
    assert now()["alarms"] == []


def test_a_start_of_minutes_is_not_silent(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "new")
    os.utime(folder / "config.yaml", (BEGAN, BEGAN))
    state = state_of(run_data.read(folder), running=True)
    assert state.at(BEGAN + START_SILENT_S - 1)["alarms"] == []
    assert [alarm["kind"] for alarm in state.at(BEGAN + START_SILENT_S + 1)["alarms"]] == ["silent"]


def test_a_resumed_run_starts_without_the_past(run: Path) -> None:
    os.utime(run / "config.yaml", (BEGAN + 5000, BEGAN + 5000))
    state = state_of(run_data.read(run), running=True).at(BEGAN + 5010)
    assert (state["phase"], state["age_s"], state["step"]) == ("starting", 10.0, 2)
    assert [alarm["kind"] for alarm in state["alarms"]] == ["equal_rewards"]


def test_only_a_change_is_rendered(run: Path) -> None:
    follower = Follower(run, lambda: True)
    follower.look()
    first = follower.newest
    follower.look()
    assert follower.newest is first
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "reward/mean": 0.75}) + "\n" + '{"step": 4, "rew')
    follower.look()
    second = follower.newest
    assert first and second and second.version != first.version and second.state.step == 3
    (run / "config.yaml").rename(run / "gone")
    follower.look()
    assert follower.newest is second and "no config.yaml" in follower.problem
    (run / "gone").rename(run / "config.yaml")
    follower.look()
    assert follower.problem == ""


def test_a_fault_of_rendering_keeps_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Follower(run, lambda: True)
    follower.look()
    first = follower.newest

    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("division by zero")

    with monkeypatch.context() as patch:
        patch.setattr(overview, "page", broken)
        os.utime(run / "config.yaml")
        follower.look()
    assert first is not None and follower.newest is first
    assert follower.problem == "the page cannot be rendered: ZeroDivisionError: division by zero"


def test_the_token_is_shown_on_a_terminal_only(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def served(*_: object) -> None:
        return None

    monkeypatch.setattr(foreground, "serve", served)
    monkeypatch.setattr(foreground, "yield_to_the_run", lambda: None)
    foreground.serve_until_interrupted(run, "127.0.0.1", 0)
    piped = capsys.readouterr().out
    token = (run / FILE).read_text()
    assert token not in piped and f"with the token in {run / FILE}" in piped
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    foreground.serve_until_interrupted(run, "127.0.0.1", 0)
    assert f"/?token={token}" in capsys.readouterr().out


def test_an_address_needs_a_port() -> None:
    def refused(**settings: Any) -> list[str]:
        return [key for key, *_ in TelemetryConfig(**settings).refusals()]

    assert refused(page_host="0.0.0.0") == ["telemetry.page_host"]
    assert refused(page=1, page_host="a b") == ["telemetry.page_host"]
    assert refused(page=0, page_host="::1") == refused(page=8265) == refused() == []
