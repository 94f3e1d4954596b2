"""Pages as files: self-contained, escaped, and complete."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_mega.models.char_tokenizer import VOCABULARY, write_tokenizer
from skyrl_mega.report import browse, overview, records
from skyrl_mega.report.records import Query
from tests.report.cases import EVIL, double, events, metrics, run_folder, single, steps_of_double, with_steps


class Elements(HTMLParser):
    """A parser that collects every element with its attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            at = len(self.found) - 1
            self.texts[at] = self.texts.get(at, "") + data

    def blocks(self) -> dict[str, Any]:
        """Returns the packed blocks, unpacked."""
        return {
            str(attributes["id"]): json.loads(gzip.decompress(base64.b64decode(self.texts[at], validate=True)))
            for at, (tag, attributes) in enumerate(self.found)
            if tag == "script" and "id" in attributes
        }


def trajectories_page(run: Path) -> str:
    return browse.page(records.load(records.files_of([run]), Query()))


@pytest.fixture(params=["trajectories", "run"])
def evil_page(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Returns a page of each kind with hostile text in every place for text."""
    run = run_folder(tmp_path / "<b onclick=x>", {1: [single(text=EVIL, metadata={EVIL: EVIL})]}, model=EVIL)
    metrics(run, [{"step": 1, "reward/mean": 0.5, f"eval/{EVIL.replace('/', '')}/mean": 0.25}])
    events(run, {"kind": "fault", "text": f"fault: {EVIL}"})
    if request.param == "trajectories":
        return trajectories_page(run)
    return overview.write([run]).read_text()


def test_hostile_text_stays_text(evil_page: str) -> None:
    tags = {tag for tag, _ in Elements(evil_page).found}
    assert "img" not in tags and "b" not in {tag for tag, a in Elements(evil_page).found if "onclick" in a}
    assert "<script>window.pwned" not in evil_page
    assert not [a for _, attributes in Elements(evil_page).found for a in attributes if a.startswith("on")]
    scripts = [a for tag, a in Elements(evil_page).found if tag == "script"]
    assert [a for a in scripts if "type" not in a] == [{}], "one program, and it is the last thing in the page"


def test_nothing_is_loaded_and_only_the_page_itself_runs(evil_page: str) -> None:
    elements = Elements(evil_page)
    for tag, attributes in elements.found:
        assert not {"src", "href", "srcset", "data", "style", "background"} & set(attributes), tag
    assert "url(" not in evil_page and "@import" not in evil_page
    [policy] = [a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().partition(" ")[::2] for rule in (policy or "").split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in (policy or "") and set(rules) == {
        *("default-src", "style-src", "script-src", "base-uri", "form-action"),
    }
    for rule, tag in (("style-src", "style"), ("script-src", "script")):
        [at] = [i for i, (name, a) in enumerate(elements.found) if name == tag and "type" not in a]
        digest = hashlib.sha256(elements.texts[at].encode()).digest()
        assert rules[rule] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_the_page_holds_tokens_masks_and_logprobs(tmp_path: Path) -> None:
    letters = [VOCABULARY[c] for c in "12+"]
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    t = single(tokens=[*letters, VOCABULARY["<eos>"]], mask=[0, 0, 1, 1])
    run = run_folder(tmp_path / "r", {3: [t, double()]}, model=str(tmp_path / "model"))
    blocks = Elements(trajectories_page(run)).blocks()
    first, second = blocks["tokens-0"]
    assert [blocks["pieces"][place] for place in first["places"]] == [
        *([id, c] for id, c in zip(letters, "12+", strict=True)),
        [VOCABULARY["<eos>"], "<eos>"],
    ]
    assert first["stretches"] == [["prompt", 0, 2], ["response", 2, 4]]
    assert np.allclose(np.array(first["logprobs"]) / -1000, [-0.25, -1.5])
    assert second["stretches"] == [["prompt", 0, 4], ["response", 4, 7], ["observation", 7, 9], ["response", 9, 12]]
    assert blocks["index"]["wrote"] == [2, 6]
    assert np.allclose(blocks["index"]["logprob"], [-0.875, -7.85 / 6], atol=1e-4)
    assert blocks["index"]["step"] == [3, 3] and blocks["index"]["weights"] == ["12", "3, 4"]
    assert dict(blocks["text-0"][1]["judged"]) == {"why": '["a", "b"]', "score": "NaN"}


def test_what_happened_when_is_in_the_page(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "r", {1: [double()]})
    steps = steps_of_double()
    steps[0]["end"], steps[1]["start"] = 3, 3  # by the steps, not by the mask
    with_steps(run / "trajectories" / "step_000001.parquet", [steps])
    blocks = Elements(trajectories_page(run)).blocks()
    parts = blocks["text-0"][0]["parts"]
    assert [part["kind"] for part in parts] == ["prompt", "response", "observation", "response"]
    assert parts[1]["calls"] == [["search", '{"query": "ü"}'], ["", "plain words"]]
    assert (parts[1]["generate"], parts[1]["reward"], parts[3]["finish"]) == (40.0, 0.25, "length")
    assert blocks["tokens-0"][0]["stretches"][0] == ["prompt", 0, 3]


def test_without_a_tokenizer_tokens_have_numbers(tmp_path: Path) -> None:
    blocks = Elements(trajectories_page(run_folder(tmp_path / "r", {1: [single()]}))).blocks()
    assert blocks["pieces"] == [[5, None], [9, None], [11, None], [3, None]]


def test_figures_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    t = single(reward=float("nan"), logprobs=[0.0, 0.0, float("-inf"), -1.0], seconds={"generate": float("inf")})
    blocks = Elements(trajectories_page(run_folder(tmp_path / "r", {1: [t]}))).blocks()
    index = blocks["index"]
    assert index["reward"] == index["logprob"] == index["generate"] == index["env"] == [None]
    assert blocks["tokens-0"][0]["logprobs"] == [99000, 1000]


def test_thousands_of_trajectories_stay_small(tmp_path: Path) -> None:
    many = [single(uid=i // 8, sample=i % 8, text=f"the answer is {i}", reward=float(i % 3)) for i in range(4000)]
    page = trajectories_page(run_folder(tmp_path / "r", {1: many}))
    assert len(page) < 600_000
    blocks = Elements(page).blocks()
    assert sum(len(value) for name, value in blocks.items() if name.startswith("text-")) == 4000
    assert blocks["text-62"][31]["parts"][1]["messages"] == [["assistant", "the answer is 3999"]]
    assert re.search(r"<title>r · trajectories</title>", page)
