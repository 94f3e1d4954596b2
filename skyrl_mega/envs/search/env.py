"""Search-R1 (arXiv:2503.09516): question answering over several turns with a search engine.

`<search>query</search>` is answered with `<information>…</information>`; `<answer>…</answer>` ends the trajectory. The
tag completed first in a turn counts. The reward is 1 for an exactly matching answer, read from the policy's own text of
this turn: neither a retrieved passage nor the question can earn the reward.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import RetrieverConfig
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option, choice, number
from skyrl_mega.envs.search.score import exact_match, f1, targets_of, wrong_targets
from skyrl_mega.envs.tags import first_tag
from skyrl_mega.retriever.client import Hit, RetrievalError, shared_client

INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Search-R1's wording, so results are comparable."""
FAILED = "The search engine did not answer. You can search again, or answer without it."

SCORES = {"exact_match": exact_match, "f1": f1}
"""Value of the option `reward` → score of an answer."""


class SearchEnv(BaseTextEnv):
    """Question answering with a search engine; a single question per trajectory."""

    metrics: ClassVar[tuple[str, ...]] = ("exact_match", "f1")
    needs_retriever: ClassVar[bool] = True
    """True: `env_config["retriever"]` is the configuration's `environment.retriever`."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "reward": choice(*SCORES, doc="what an answer's reward is"),
        "wrong_answer": number(0.0, "reward of an answer that is wrong"),
        "invalid": choice(
            "explain",
            "empty",
            doc="what follows a turn with neither tag: how to write one, as Search-R1; or no passages, as SkyRL's runs",
        ),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        options = dict(env_config or {})
        self.retriever: RetrieverConfig = options.pop("retriever")
        super().__init__(options, extras)
        self.score = SCORES[self.options["reward"]]
        self.wrong_answer = float(self.options["wrong_answer"])
        self.invalid = INVALID if self.options["invalid"] == "explain" else _information("")
        self.targets = targets_of(self.ground_truth)
        self.searches: list[dict[str, Any]] = []
        """Searches so far: query, found ids, seconds, and an error for a failed search."""

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks that a retrieval service is set: its address or an index.

        Raises:
            UserError: Neither is set.
        """
        retriever: RetrieverConfig = options["retriever"]
        if not (retriever.url or retriever.index):
            raise UserError(
                "environment.retriever.url is not set: environment search sends its queries to a retrieval service",
                fix="give its address, or environment.retriever.index, the folder of an index that "
                "the run serves itself",
            )

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns the reason why a ground truth has no usable right answer; None if it has an answer."""
        return wrong_targets(truth)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Executes the query in `<search>`, or judges the text in `<answer>`; the first of the two tags counts. In the
        last turn (`max_turns`) a query is not executed.

        Returns:
            For a query, a message with passages, and reward 0; for a turn with neither tag, the message of the option
            `invalid`, and 0. For an answer the end, with the score chosen by the option `reward`, or the option
            `wrong_answer` for a score of 0. A last turn without an answer ends with 0. A failed search is a message for
            the policy, not an error. `metadata` has `searches` (all so far) and `search_errors` (their failures),
            after an answer also `answer`, `exact_match` and `f1`, and after a query `tool_calls`.
        """
        self.turns += 1
        tag = first_tag(action, "search", "answer")
        kind, text = (tag.name, tag.text.strip()) if tag else (None, "")
        if kind == "answer":
            score = self.score(text, self.targets)
            judged = {"answer": text, "exact_match": exact_match(text, self.targets), "f1": f1(text, self.targets)}
            return self._output([], score or self.wrong_answer, True, judged)
        if self.turns >= self.max_turns:  # the policy could not read the result of a search
            return self._output([], 0.0, True, {})
        observation = self._search(text) if kind == "search" else self.invalid
        calls = {"tool_calls": [{"name": "search", "arguments": {"query": text}}]} if kind == "search" else {}
        return self._output([{"role": "user", "content": observation}], 0.0, False, calls)

    def _search(self, query: str) -> str:
        settings = self.retriever
        start = time.perf_counter()
        record: dict[str, Any] = {"query": query}
        try:
            assert settings.url is not None, "environment.retriever.url"
            client = shared_client(settings.url, os.environ.get(settings.token_variable), settings.timeout_s)
            hits = client.search([query], settings.topk)[0]
            record["found"] = [hit.id for hit in hits]
            text = "\n".join(_shown(rank, hit, settings.passage_chars) for rank, hit in enumerate(hits, start=1))
        except RetrievalError as error:
            record["error"] = str(error)
            text = FAILED
        record["seconds"] = round(time.perf_counter() - start, 3)
        self.searches.append(record)
        return _information(text)

    def _output(
        self, observations: list[dict[str, Any]], reward: float, done: bool, judged: dict[str, Any]
    ) -> BaseTextEnvStepOutput:
        errors = sum("error" in record for record in self.searches)
        metadata = {**judged, "searches": list(self.searches), "search_errors": errors}
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata=metadata)


def _information(text: str) -> str:
    return f"\n<information>{text}</information>\n"


def _shown(rank: int, hit: Hit, chars: int) -> str:
    """Returns a passage for the policy: the starts of the title (up to a line break) and the text."""
    title, _, text = hit.contents.partition("\n")
    return f"Doc {rank}(Title: {title[:chars]}) {text[:chars]}"
