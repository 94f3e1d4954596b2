"""Metrics of evaluation sets with names that differ only in punctuation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyrl_mega.data.sources import set_names
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.evaluate.sets import _by_source
from skyrl_mega.trainer.evaluation import scores
from tests.trainer.health_steps import said


def prompt(uid: int, source: Any) -> Prompt:
    return Prompt(uid=uid, messages=[], env_class="gsm8k", extras={"data_source": source})


def test_names_are_kept_where_they_can_be() -> None:
    names = set_names(["nq open", "nq/open", "nq_open", "nq.open", "a b", "data"])
    assert names["nq_open"] == "nq_open" and names["nq.open"] == "nq.open" and names["a b"] == "a_b"
    assert {names["nq open"], names["nq/open"]} == {"nq_open_2", "nq_open_3"}
    assert set_names(["b/c", "b_c", "b_c_2"]) == {"b_c": "b_c", "b_c_2": "b_c_2", "b/c": "b_c_3"}


def test_sets_that_differ_in_punctuation_have_figures_of_their_own() -> None:
    prompts = [prompt(0, "nq/open"), prompt(1, "nq_open"), prompt(2, None)]
    assert {name: [p.uid for p in of] for name, of in _by_source(prompts).items()} == {
        "nq_open_2": [0],
        "nq_open": [1],
        "data": [2],
    }
    trajectories = [replace(said(p.uid, "x", float(p.uid == 0)), prompt=p) for p in prompts]
    figures = scores(trajectories)
    assert {name: value for name, value in figures.items() if name.endswith("/mean")} == {
        "eval/nq_open_2/mean": 1.0,
        "eval/nq_open/mean": 0.0,
        "eval/data/mean": 0.0,
    }
