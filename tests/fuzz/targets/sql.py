"""Queries against a database, which must stay bounded and read-only, and the rewards of text2sql."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.envs.sandbox import Sandbox
from skyrl_mega.envs.text2sql.database import START_S, Database, QueryResult
from skyrl_mega.envs.text2sql.env import LIMITS
from tests.fuzz import queries
from tests.fuzz.judged import case_of, play
from tests.fuzz.target import Target
from tests.fuzz.words import Pieces, said, tags, without, words

SECONDS = 1.0
SLACK_S = 8.0
"""Seconds allowed for a busy machine."""
TAGS = tags("sql", "solution", "think", "observation")
FORBIDDEN = ["<sql", "</sql", "<solution", "</solution", "<think", "</think", "<observation", "</observation"]


@cache
def _folder() -> Path:
    """Returns a folder with `library/library.sqlite`, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="skyrl-fuzz-sql-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    (folder / "library").mkdir()
    queries.write(_file(folder))
    return folder


def _file(folder: Path) -> Path:
    return folder / "library" / "library.sqlite"


def _state() -> list[Any]:
    folder = _folder()
    info = _file(folder).stat()
    names = sorted(str(path) for path in folder.rglob("*"))
    return [names, hashlib.sha256(_file(folder).read_bytes()).hexdigest(), info.st_mtime_ns, info.st_mode]


def _sql(random: Random) -> Any:
    gold = queries.query(random) if random.random() < 0.3 else None
    return {"sql": queries.hostile(random), "gold": gold, "compare": random.choice(("set", "rows"))}


def _run_sql(case: Any, folder: Path) -> None:
    before = _state()
    database = Database(
        _file(_folder()), Sandbox(LIMITS, name="fuzz sql"), rows=10_000, shown=50, compare=case["compare"]
    )
    sql, start = said(case["sql"]).encode(errors="replace").decode(), time.monotonic()
    if case["gold"] is None:
        _bounded(database.query(sql, SECONDS))
        most = SECONDS + START_S + SLACK_S
    else:
        why, ours, gold = database.differ(sql, case["gold"], SECONDS)
        _bounded(ours)
        _bounded(gold)
        most = 2 * SECONDS + START_S + SLACK_S
        assert why is not None or (ours.error is None and gold.error is None)
    assert time.monotonic() - start < most, f"it took {time.monotonic() - start:.1f} s"
    assert _state() == before, f"{before} → {_state()}"


def _bounded(table: QueryResult) -> None:
    text = table.text(9000)
    text.encode()
    assert len(text) <= 9100, len(text)
    assert (table.error is None) == (table.columns != []), table


def _text2sql(random: Random) -> Any:
    gold, turns, compare = queries.query(random), random.randrange(1, 5), random.choice(("set", "rows"))
    options = {"db_path": "", "compare": compare, "query_timeout_s": 1.0, "reward_timeout_s": 20.0}
    case = partial(case_of, gold, low=-1.0, high=1.0, turns=turns, options=options, db_id="library")
    texts: list[Pieces] = []
    for _ in range(random.randrange(turns)):
        looked = queries.hostile(random) if random.random() < 0.3 else [[queries.query(random), 1]]
        texts.append([["<think>", 1], *without(random, FORBIDDEN), ["</think><sql>", 1], *looked, ["</sql>", 1]])
        if any(mark in said(looked) for mark in FORBIDDEN):
            return case(say=texts, reward=None)
    think: Pieces = [["<think>", 1], *without(random, FORBIDDEN), ["</think>", 1]]
    match random.randrange(5):
        case 0:
            return case(say=[words(random, TAGS) for _ in range(turns)], reward=None)
        case 1:
            broken = random.choice(
                (
                    [[f"<solution>{gold}</solution>", 2]],
                    [[f"<solution>{gold}<sql></solution>", 1]],
                    [[f"</solution>{gold}<solution>", 1]],
                    [[f"<solution><solution>{gold}</solution>", 1]],
                    [[f"<solution>{gold}", 1]],
                )
            )
            last = [[*think, *broken]] * (turns - len(texts))
            return {**case(say=[*texts, *last], reward=-1.0)}
        case 2:
            return case(say=[[*without(random, FORBIDDEN), [f"<solution>{gold}</solution>", 1]]], reward=-1.0)
        case _:
            solution = random.choice((gold, queries.query(random), *[queries.rewritten(random, gold)] * 4))
            end = without(random, FORBIDDEN)
            drawn_case = case(say=[*texts, [*think, [f"<solution>{solution}</solution>", 1], *end]], reward=None)
            return {**drawn_case, "solution": solution}


def _run_text2sql(case: Any, folder: Path) -> None:
    before = _state()
    options = {**case["options"], "db_path": str(_folder())}
    reward = case["reward"]
    if "solution" in case:
        gold = case["row"]["reward_spec"]["ground_truth"]
        agree = queries.agree(_file(_folder()), case["solution"], gold, options["compare"])
        reward = 0.0 if agree is None else float(agree)
    play("text2sql", {**case, "options": options, "reward": reward})
    assert _state() == before, f"{before} → {_state()}"


def _prepare() -> None:
    _folder()


TARGETS = {
    "sql": Target(_sql, _run_sql, errors=(), bound_s=60.0, share=4.0, prepare=_prepare),
    "text2sql": Target(_text2sql, _run_text2sql, errors=(), bound_s=90.0, share=4.0, prepare=_prepare),
}
