"""Text to SQL over several turns (SkyRL-SQL): the policy explores a database, then gives a final query."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option, choice, group, number, text, whole
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox
from skyrl_mega.envs.sandbox.run import settings
from skyrl_mega.envs.tags import first_tag
from skyrl_mega.envs.text2sql.database import Database, refuse_unmerged, wrong_query
from skyrl_mega.envs.text2sql.reward import solution
from skyrl_mega.envs.truths import spec_of

FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
"""Data set in a row's `data` → folder of the databases below `db_path`, in the layout of SkyRL's users."""

BOX = "environment.options.text2sql.sandbox"
"""Setting of the sandbox."""
LIMITS = CommandLimits(processes=4)
INVALID = "Your previous action is invalid: think inside <think>…</think>, then give one query inside <sql>…</sql>."


class Text2SqlEnv(BaseTextEnv):
    """A question about a database. `<sql>…</sql>` runs a query, and the rows come back in an `<observation>`;
    `<solution>…</solution>` ends the trajectory.

    The last step's reward is −1 for a broken format, 1 if the solution returns the same rows as
    `reward_spec.ground_truth`, else 0. The row's `db_id` names the database: `<db_path>/<db_id>/<db_id>.sqlite`.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "db_path": text(None, "folder of the databases"),
        "compare": choice(
            "set",
            "rows",
            doc="set: as SkyRL; rows: duplicates and the order of ORDER BY count, columns may be permuted",
        ),
        "query_timeout_s": number(5.0, "for a query of the policy's", above=0, high=86400),
        "reward_timeout_s": number(20.0, "for each of the two queries that are compared", above=0, high=86400),
        "max_rows": whole(100_000, "rows of a result that are compared", low=1),
        "shown_rows": whole(50, "rows that the policy sees", low=1),
        "shown_characters": whole(9000, "characters of them that the policy sees", low=1),
        "sandbox": group(settings(LIMITS), "limits of one query"),
    }
    """Defaults of the query's time, the rows and the characters shown are SkyRL-SQL's. SkyRL-SQL's reward takes up to
    30 s per query, and two such queries exceed the default `rollout.env_timeout_s`.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        options = self.options
        box = Sandbox.from_options(options["sandbox"], BOX)
        file = find_database(options["db_path"], self.extras.get("db_id"), self.extras.get("data"))
        self.database = Database(
            file, box, int(options["max_rows"]), int(options["shown_rows"]), compare=options["compare"]
        )
        self.written: list[str] = []
        """Texts of the policy, one per turn."""

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks the folder of databases, and the machine's confinement.

        Raises:
            UserError: The folder is missing, or the machine lacks a confinement.
            InfrastructureFault: The sandbox does not start.
        """
        if options["db_path"] is None or not Path(options["db_path"]).is_dir():
            raise UserError(
                "allowed: the folder of the databases",
                key="environment.options.text2sql.db_path",
                value=options["db_path"],
            )
        Sandbox.from_options(options["sandbox"], BOX).check(BOX)

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a text that is not empty, the gold query; else the reason."""
        return None if isinstance(truth, str) and truth.strip() else "allowed is a query, a text"

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a row is wrong: its ground truth is no query, its database is missing, or the query
        does not compile there. None for a valid row."""
        if reason := super().wrong_row(row, options):
            return reason
        try:
            file = find_database(options["db_path"], row.get("db_id"), row.get("data"))
        except UserError as error:
            return str(error)
        column, spec = spec_of(row)
        reason = wrong_query(file, spec["ground_truth"])
        return (
            f"column {column}.ground_truth = {shown(spec['ground_truth'])}: {file.name} says {reason}"
            if reason
            else None
        )

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Runs the query in `<sql>` and returns the rows, or judges the solution: after `<solution>…</solution>` or the
        last turn.

        A solution earns 1 for the gold query's rows, else 0; −1 for a broken format. Earlier turns earn 0. A failing
        query is an observation for the policy, not an error. `metadata` has in earlier turns `sql` (None without a
        query) and after a query `error` and `tool_calls`. In the last turn it has `solution` (None for a broken
        format), with a solution `error`, and if there are any `gold_error` and `differs`, the reason why the rows
        differ.

        Raises:
            InfrastructureFault: The sandbox cannot start, or the database cannot be read.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        self.turns += 1
        self.written.append(action)
        if self.turns >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            reward, metadata = self._judge()
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)
        tag = first_tag(action, "sql")
        if tag is None:
            return self._answer(INVALID, {"sql": None})
        table = self.database.query(tag.text, float(self.options["query_timeout_s"]))
        rows = table.text(int(self.options["shown_characters"]))
        calls = [{"name": "sql", "arguments": {"query": tag.text}}]
        return self._answer(rows, {"sql": tag.text, "error": table.error, "tool_calls": calls})

    def _answer(self, result: str, metadata: dict[str, Any]) -> BaseTextEnvStepOutput:
        message = {"role": "user", "content": observation(result, self.max_turns - self.turns)}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)

    def _judge(self) -> tuple[float, dict[str, Any]]:
        sql = solution(self.written)
        if sql is None:
            return -1.0, {"solution": None}
        reason, ours, gold = self.database.differ(sql, str(self.ground_truth), float(self.options["reward_timeout_s"]))
        metadata = {"solution": sql, "error": ours.error}
        if gold.error is not None:
            metadata["gold_error"] = gold.error
        if reason is not None:
            metadata["differs"] = reason
        return float(reason is None), metadata


def observation(result: str, turns_left: int) -> str:
    """Returns the policy's view of a query's result, in SkyRL-SQL's form: `<observation>` around the result and a
    reminder of the turns left."""
    reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
    return f"\n\n<observation>{result}\n{reminder}</observation>\n\n"


def find_database(folder: str | Path | None, db_id: Any, data: Any = None) -> Path:
    """Returns the SQLite file of a row.

    Args:
        folder: `db_path`.
        db_id: Name of the database in the row; never a path.
        data: Data set of the row, `synsql`, `spider` or `bird`, with databases possibly in the folder of `FOLDERS`.

    Raises:
        UserError: `folder` is None, `db_id` is no name, the file does not exist, or its write-ahead log is not empty.
    """
    if folder is None:
        raise UserError("environment.options.text2sql.db_path is not set; allowed: the folder of the databases")
    if not isinstance(db_id, str) or not re.fullmatch(r"[\w .()-]+", db_id) or db_id in (".", ".."):
        raise UserError(f"column db_id: {db_id!r}; allowed: the name of a database")
    root = Path(folder)
    parents = [root / FOLDERS[data]] if data in FOLDERS else []
    for parent in (*parents, root):
        file = parent / db_id / f"{db_id}.sqlite"
        if file.is_file():
            refuse_unmerged(file)
            return file
    raise UserError(f"it has no {db_id}/{db_id}.sqlite", key="environment.options.text2sql.db_path", value=folder)
