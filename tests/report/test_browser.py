"""The pages in a real browser, if installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.models.char_tokenizer import VOCABULARY, write_tokenizer
from skyrl_mega.report import __main__ as command
from tests.report import browser as chromium
from tests.report.browser import Browser
from tests.report.cases import EVIL, double, events, metrics, run_folder, single, steps_of_double, timelines, with_steps

if chromium.program() is None:
    pytest.skip(f"no browser: none of {', '.join(chromium.NAMES)} is installed", allow_module_level=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run of two steps: 300 short trajectories, then a hostile trajectory and a trajectory of two timed
    turns.
    """
    folder = tmp_path_factory.mktemp("pages")
    (folder / "model").mkdir()
    write_tokenizer(folder / "model")
    letters = [VOCABULARY[c] for c in "2*36"]
    many = [
        single(uid=i // 4, sample=i % 4, reward=float(i % 4 == 0), text=f"answer {i}", tokens=letters)
        for i in range(300)
    ]
    evil = single(uid=900, text=EVIL, metadata={"said": EVIL}, tokens=letters)
    run = run_folder(folder / "r", {1: many, 2: [evil, double()]}, model=str(folder / "model"))
    with_steps(run / "trajectories" / "step_000002.parquet", [[], steps_of_double()])
    metrics(run, [{"step": s, "reward/mean": s / 10, "time/step": 2.0, "time/train": 1.5} for s in range(1, 9)])
    events(run, {"kind": "fault", "text": f"fault: {EVIL}"})
    timelines(run, 8, engines=20)
    return run


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    file = run.parent / "trajectories.html"
    assert command.main(["trajectories", str(run), "--html", str(file)]) == 0
    return file


def opened(browser: Browser, page: Path, number: int) -> None:
    browser.errors.clear()
    browser.open(page, f"#{number}")
    browser.until(f"location.hash === '#{number}' && document.querySelector('main .speech')")


def texts(browser: Browser, selector: str) -> Any:
    return browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")


def test_hostile_text_is_shown_and_does_nothing(browser: Browser, page: Path) -> None:
    opened(browser, page, 300)
    for key in "123s":
        browser.key(key)
        browser.until("document.querySelector('main .speech')")
    browser.key("s")
    browser.until("!document.querySelector('main .policy .tokens') && document.querySelector('main .policy .said')")
    [shown] = texts(browser, "main .policy .said")
    assert shown == EVIL.replace("\u202e", "[U+202E]").replace("\x1b", "␛")
    assert browser.value("window.pwned === undefined && document.images.length === 0")
    assert browser.errors == []
    assert all(url.startswith("file://") or url == "about:blank" for url in browser.requests)


def test_its_policy_stops_what_is_not_its_own(browser: Browser, page: Path) -> None:
    opened(browser, page, 0)
    browser.value(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 3';"
        " document.body.append(s); const i = new Image(); i.src = 'http://127.0.0.1:9/x'; document.body.append(i); })()"
    )
    browser.until("document.images.length === 1")
    assert browser.value("window.pwned === undefined")
    assert any("Content Security Policy" in error for error in browser.errors)


def test_turns_are_told_apart_with_what_is_known_of_them(browser: Browser, page: Path) -> None:
    opened(browser, page, 301)
    kinds = browser.value("[...document.querySelectorAll('main .speech')].map((n) => n.className.split(' ')[1])")
    assert kinds == ["prompt", "prompt", "prompt", "policy", "env", "policy"]
    first, second = texts(browser, "main .policy header")
    assert "turn 1" in first and "reward 0.25" in first and "3 tokens" in first and "generate 40.0 s" in first
    assert "length" in second and "env 250 ms" in second
    assert texts(browser, "main .call") == ['search {"query": "ü"}', "tool call plain words"]
    assert "truncated · turns" in texts(browser, ".title")[0]


def test_every_token_of_the_policy_is_shaded_by_its_logprob(browser: Browser, page: Path) -> None:
    opened(browser, page, 301)
    browser.key("2")
    browser.until("document.querySelector('main .masked .tokens')")
    policy = browser.value(
        "[...document.querySelectorAll('main .policy .t')].map((n) => [n.dataset.milli, n.className])"
    )
    assert [int(milli) for milli, _ in policy] == [100, 2000, 200, 50, 500, 5000]
    shades = [int(name.split("l")[-1]) for _, name in policy]
    by_milli = [shades[i] for i in (3, 0, 2, 4, 1, 5)]
    assert by_milli == sorted(by_milli) and len(set(by_milli)) >= 5, "the less likely, the darker"
    colours = browser.value(
        "[...document.querySelectorAll('main .policy .t')].map((n) => getComputedStyle(n).backgroundColor)"
    )
    assert len(set(colours)) >= 5
    masked = browser.value("[...document.querySelectorAll('main .masked .t')].map((n) => n.dataset.milli ?? null)")
    assert masked == [None] * 6
    assert (
        "weights 3" in texts(browser, "main .policy header")[0]
        and "weights 4" in texts(browser, "main .policy header")[1]
    )
    browser.point(*middle(browser, "main .policy .t:nth-child(2)"))
    browser.until("!document.querySelector('.tip').hidden")
    assert texts(browser, ".tip") == ["token 5 · id 25 · log-prob -2.000 · p 0.135"]
    browser.key("1")


def test_keys_go_along_the_list_and_the_samples(browser: Browser, page: Path) -> None:
    opened(browser, page, 4)
    for key, number in (("j", 5), ("k", 4), ("ArrowRight", 5), ("ArrowLeft", 4), ("G", 301), ("k", 300), ("g", 0)):
        browser.key(key)
        browser.until(f"location.hash === '#{number}'")
    assert browser.value("document.querySelectorAll('.row').length") < 60, "rows out of sight do not exist"
    browser.key("3")
    browser.until("document.querySelectorAll('.column').length === 4")
    assert "4 samples with a mean reward of 0.250" in texts(browser, ".common summary")[0]
    assert [head.split(" ")[1][0] for head in texts(browser, ".column .head")] == ["0", "1", "2", "3"]
    browser.key("1")


def middle(browser: Browser, selector: str) -> Any:
    """Returns the position of an element's centre in the window."""
    box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
    return browser.value(f"(() => {{ const r = {box}; return [r.x + r.width / 2, r.y + r.height / 2]; }})()")


def give(browser: Browser, selector: str, value: str) -> None:
    """Fills in a field, like a person."""
    browser.value(
        f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input')); })()"
    )


def shown(browser: Browser) -> str:
    return str(texts(browser, ".sum")[0])


def test_filters_and_order(browser: Browser, page: Path) -> None:
    opened(browser, page, 0)
    assert shown(browser).startswith("302 trajectories · mean reward ")
    give(browser, "input[type=search]", "ANSWER 29")
    browser.until("document.querySelector('.sum').textContent.startsWith('11 of 302')")
    give(browser, 'input[aria-label="reward min"]', "1")
    browser.until("document.querySelector('.sum').textContent.startsWith('2 of 302')")
    assert [row.split("answer ")[1] for row in texts(browser, ".row")] == ["292", "296"]
    assert browser.value("CSS.highlights.get('found').size") == 1
    give(browser, "input[type=search]", "")
    give(browser, 'input[aria-label="reward min"]', "")
    give(browser, 'select[aria-label="any status"]', "truncated_turns")
    browser.until("document.querySelector('.sum').textContent.startsWith('1 of 302')")
    give(browser, 'select[aria-label="any status"]', "")
    give(browser, 'select[aria-label="order"]', "tokens")
    browser.value("document.querySelector('button[aria-label=\"turn the order around\"]').click()")
    browser.until("document.querySelector('.row').textContent.includes('prompt 8')")


def test_a_runs_page_tells_a_step_in_every_plot(browser: Browser, run: Path) -> None:
    assert command.main(["run", str(run)]) == 0
    browser.errors.clear()
    browser.open(run / "report.html", dark=True)
    browser.until("document.querySelector('.theme')")
    box = "document.querySelector('svg').getBoundingClientRect()"
    browser.point(*browser.value(f"(() => {{ const r = {box}; return [r.right - 12, r.y + r.height / 2]; }})()"))
    browser.until("document.querySelector('.cursor')")
    assert texts(browser, ".hint b") == ["step 8"]
    assert browser.value(
        "document.querySelectorAll('.cursor').length === document.querySelectorAll('figure:not(.broad)').length"
    )
    assert texts(browser, ".fault pre") == [EVIL] and browser.value("window.pwned === undefined")
    dark = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.value("document.querySelector('.theme').click()")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != dark
    assert browser.errors == []


def test_the_picture_of_steps_is_drawn_in_the_pages_colours(browser: Browser, run: Path) -> None:
    assert command.main(["run", str(run)]) == 0
    browser.errors.clear()
    browser.open(run / "report.html")
    assert texts(browser, ".broad text:not([text-anchor])") == ["step 6", "step 7", "step 8", "▾ v6", "▾ v7", "▾ v8"]
    names = texts(browser, ".broad text[text-anchor=end]")
    assert names[:3] == ["driver", "policy", "engines 0–1"] and len(names) == 2 + 10 + 1
    fills = {
        name: browser.value(f"getComputedStyle(document.querySelector('.broad .{name}')).fill")
        for name in ("lane", "busy", "area", "updated", "bar")
    }
    assert "rgb(0, 0, 0)" not in fills.values(), "a shape without a style is black"
    assert browser.errors == []
