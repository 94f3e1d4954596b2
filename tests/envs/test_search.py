"""The search environment: rewarded and unrewarded answers, and its behaviour without a service."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig, RetrieverConfig
from skyrl_mega.envs import make, registry
from skyrl_mega.envs.search import facts
from skyrl_mega.envs.search.env import FAILED, SearchEnv, _shown
from skyrl_mega.envs.search.score import exact_match, f1, normalise, targets_of
from skyrl_mega.retriever.build import build
from skyrl_mega.retriever.client import Hit
from skyrl_mega.retriever.session import running_service
from tests.retriever.services import write_corpus


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentConfig]:
    """Yields the configuration of a real service over the project's facts."""
    folder = tmp_path_factory.mktemp("search")
    build(write_corpus(folder / "corpus.jsonl"), folder / "index", methods=("bm25",))
    settings = EnvironmentConfig(retriever=RetrieverConfig(index=str(folder / "index"), topk=2))
    with running_service(settings, folder) as served:
        yield served


NOBODY = EnvironmentConfig(retriever=RetrieverConfig(url="http://127.0.0.1:9", timeout_s=0.3))


def env_of(target: Any, config: EnvironmentConfig = NOBODY, turns: int = 4) -> SearchEnv:
    env = make("search", {"reward_spec": {"ground_truth": target}}, config, max_turns=turns)
    assert isinstance(env, SearchEnv)
    return env


# --- the score ---


@pytest.mark.parametrize(
    "answer, targets, exact",
    [
        # The cases of Search-R1's paper (arXiv:2503.09516): its own answer, and R1's without search.
        (" McComb, Mississippi ", ["McComb, Mississippi"], 1),
        ("Houston", ["McComb, Mississippi"], 0),
        # SQuAD's evaluation script: case, articles, punctuation and spaces do not count; word order does.
        ("The Beatles", ["beatles"], 1),
        ("beatles.", ["The Beatles"], 1),
        ("an   Apple-a-day!", ["appleaday"], 1),
        ("1,000", ["1000"], 1),
        ("U.S.", ["us"], 1),
        ("theatre", ["atre"], 0),
        ("Mississippi McComb", ["McComb, Mississippi"], 0),
        ("spa pool", ["swimming bath", "spa pool"], 1),
        ("Danube river", ["Danube"], 0),
        ("", ["Danube"], 0),
        ("", ["A"], 0),  # unlike SQuAD: two empty remainders are not equal
        ("", ["!!!"], 0),
        ("the", ["A"], 0),
        ("?", ["!!!"], 0),
        ("a", ["A"], 1),
        ("!!!", ["!!!"], 1),
        ("", [""], 1),
    ],
)
def test_exact_match(answer: str, targets: list[str], exact: float) -> None:
    assert exact_match(answer, targets) == exact


@pytest.mark.parametrize(
    "answer, targets, score",
    [
        ("the Danube river", ["Danube"], 2 / 3),
        ("Buenos Aires", ["Aires Buenos"], 1),
        ("cat cat dog", ["cat dog dog"], 2 / 3),
        ("river", ["Danube", "river Danube", "lake"], 2 / 3),
        ("x", ["y"], 0),
        ("the", ["a"], 0),
        ("The", ["the"], 1),
        ("", ["a"], 0),
        ("", ["y"], 0),
    ],
)
def test_f1(answer: str, targets: list[str], score: float) -> None:
    assert f1(answer, targets) == pytest.approx(score)


@given(st.text(max_size=30), st.text(max_size=30))
def test_scores_agree_with_each_other(a: str, b: str) -> None:
    assert normalise(normalise(a)) == normalise(a) or re.search(r"\b(a|an|the)\b", normalise(a))
    assert f1(a, [b]) == pytest.approx(f1(b, [a])) and 0 <= f1(a, [b]) <= 1
    assert exact_match(a, [b]) <= f1(a, [b])


@pytest.mark.parametrize(
    "given, want",
    [({"target": ["a", "b"]}, ["a", "b"]), (["a"], ["a"]), ("a", ["a"]), (1912, ["1912"]), (None, []), ({}, [])],
)
def test_ground_truths(given: Any, want: list[str]) -> None:
    assert targets_of(given) == want


# --- the environment ---


def test_a_whole_trajectory(config: EnvironmentConfig) -> None:
    env = env_of({"target": ["forint"]}, config)
    first = env.step("<think>Which country?</think><search> capital Budapest </search>")
    assert (first["reward"], first["done"]) == (0.0, False)
    (message,) = first["observations"]
    assert message["role"] == "user"
    opening = '\n<information>Doc 1(Title: "Budapest") Budapest is the capital of Hungary.'
    assert message["content"].startswith(opening) and message["content"].endswith("</information>\n")
    second = env.step("<search>currency of Hungary</search>")
    assert "Its currency is the forint." in second["observations"][0]["content"]
    last = env.step("<answer> The Forint </answer>")
    assert (last["reward"], last["done"], last["observations"]) == (1.0, True, [])
    assert (last["metadata"]["answer"], last["metadata"]["exact_match"]) == ("The Forint", 1.0)
    queries = [search["query"] for search in last["metadata"]["searches"]]
    assert queries == ["capital Budapest", "currency of Hungary"] and last["metadata"]["search_errors"] == 0
    assert all(len(search["found"]) == 2 for search in last["metadata"]["searches"])


@pytest.mark.parametrize(
    "action, reward, done",
    [
        ("<answer>gold</answer>", 1, True),
        ("<answer>\ngold\n</answer>", 1, True),
        ("<think><answer></think><answer>gold</answer>", 0, True),  # the first tag opens the answer
        ("<answer>lead</answer><answer>gold</answer>", 0, True),  # no list of guesses
        ("<search>never closed <answer>gold</answer>", 1, True),
        ("<answer>gold", 0, False),
        ("gold", 0, False),
        ("answer: gold</answer>", 0, False),
        ("<ANSWER>gold</ANSWER>", 0, False),
        ("", 0, False),
    ],
)
def test_the_form_of_an_answer(action: str, reward: float, done: bool) -> None:
    output = env_of(["gold"]).step(action)
    assert (output["reward"], output["done"]) == (reward, done)
    assert done or "between <search> and </search>" in output["observations"][0]["content"]


def test_the_last_turn_searches_no_more() -> None:
    env = env_of("x", turns=2)
    env.step("nothing")
    end = env.step("<search>too late</search>")
    assert (end["done"], end["observations"], end["metadata"]["searches"]) == (True, [], [])
    assert env_of("x", turns=1).step("<answer>x</answer>")["reward"] == 1.0


def test_without_its_service_the_policy_is_told() -> None:
    env = env_of("x")
    output = env.step("<search>anything</search>")
    assert output["observations"] == [{"role": "user", "content": f"\n<information>{FAILED}</information>\n"}]
    (search,) = output["metadata"]["searches"]
    assert output["metadata"]["search_errors"] == 1 and "http://127.0.0.1:9/retrieve" in search["error"]
    assert env.step("<answer>x</answer>")["reward"] == 1.0


def test_a_turn_with_neither_tag() -> None:
    """Compares with Search-R1's own words and with the reply of SkyRL's published runs: empty passages."""
    empty = dataclasses.replace(NOBODY, options={"search": {"invalid": "empty"}})
    for config, start in ((NOBODY, "My previous action is invalid"), (empty, "\n<information></information>\n")):
        output = env_of("x", config).step("I think")
        assert not output["done"] and output["observations"][0]["content"].strip().startswith(start.strip())


def test_options(config: EnvironmentConfig) -> None:
    partial = EnvironmentConfig(
        options={"search": {"reward": "f1", "wrong_answer": 0.1}}, retriever=RetrieverConfig(url="http://127.0.0.1:9")
    )
    assert env_of("river Danube", partial).step("<answer>Danube</answer>")["reward"] == pytest.approx(2 / 3)
    assert env_of("Danube", partial).step("<answer>Seine</answer>")["reward"] == 0.1
    assert env_of("Danube", partial, turns=1).step("Seine")["reward"] == 0.0
    short = EnvironmentConfig(retriever=RetrieverConfig(url=config.retriever.url, topk=1, passage_chars=5))
    content = env_of("x", short).step("<search>capital Budapest</search>")["observations"][0]["content"]
    assert content == '\n<information>Doc 1(Title: "Buda) Budap</information>\n'


def test_a_passage_without_a_line_break_is_cut_too() -> None:
    assert _shown(1, Hit("1", "many words " * 10_000, 1.0), 20) == "Doc 1(Title: many words many word) "


@pytest.mark.parametrize(
    "options, said",
    [
        (
            {"rewrad": "f1"},
            "environment.options.search.rewrad: there is no such option; did you mean reward? "
            "allowed is a mapping of reward, wrong_answer, invalid",
        ),
        ({"reward": "bleu"}, "environment.options.search.reward = bleu: allowed is one of exact_match, f1"),
        ({"wrong_answer": "no"}, "environment.options.search.wrong_answer = 'no': allowed is a number"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        registry.check(EnvironmentConfig(options={"search": options}))
    assert str(caught.value) == said


def test_a_search_without_a_service_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"environment\.retriever\.url is not set: environment search sends"):
        registry.check_ready("search", EnvironmentConfig())
    registry.check_ready("search", NOBODY)


def test_environments_of_many_threads_share_a_service(config: EnvironmentConfig) -> None:
    from concurrent.futures import ThreadPoolExecutor

    countries = facts.countries()

    def play(country: facts.Country) -> str:
        output = env_of("x", config).step(f"<search>{country.capital} capital of {country.name}</search>")
        return str(output["observations"][0]["content"])

    with ThreadPoolExecutor(32) as threads:
        for country, content in zip(countries, threads.map(play, countries), strict=True):
            assert country.capital_passage in content
