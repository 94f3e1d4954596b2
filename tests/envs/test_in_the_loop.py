"""Harm inside the agent loop: each trajectory is contained and scored, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.chat import Chat
from skyrl_mega.rollout.trajectory import Status
from tests.support.scripted import Scripted, play


HARMFUL_SQL = (
    "DROP TABLE book",
    "ATTACH '/etc/passwd' AS x",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
)
HARMFUL_PYTHON = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "print(open('/etc/passwd').read())",
    "import socket; socket.create_connection(('127.0.0.1', 22))",
    "x = [bytearray(2**26) for _ in range(1000)]",
)


def scripts_of(prompts: list[Prompt]) -> Iterator[tuple[Prompt, list[str]]]:
    sql, code = prompts
    gold = sql.extras["reward_spec"]["ground_truth"]
    for harm in HARMFUL_SQL:
        yield sql, [f"<think>a</think><sql>{harm}</sql>", f"<think>b</think><solution>{gold}</solution>"]
    for harm in HARMFUL_PYTHON:
        answer = code.extras["reward_spec"]["ground_truth"]
        yield code, [f"<python>{harm}</python>", f"<answer>{answer}</answer>"]


@pytest.mark.slow
def test_harm_ends_nothing_but_its_own_turn(smollm2: Path, tmp_path: Path) -> None:
    prepare(f"text2sql --output {tmp_path / 'sql'} --limit 1")
    prepare(f"python --output {tmp_path / 'python'} --train 1 --test 1")
    options = {
        "text2sql": {"db_path": str(tmp_path / "sql" / "database"), "query_timeout_s": 1},
        "python": {"sandbox": {"wall_s": 2, "memory_mib": 256}},
    }
    config = EnvironmentConfig(options=options)
    files = [tmp_path / "sql" / "train.parquet", tmp_path / "python" / "train.parquet"]
    chat = Chat(str(smollm2))
    scripts = [(prompt, Scripted(chat, lines)) for prompt, lines in scripts_of(load_prompts(files, config))]
    played = play(chat, config, scripts)
    assert len(played) == 8
    for trajectory in played:
        assert (trajectory.status, trajectory.reward, trajectory.turns) == (Status.COMPLETED, 1.0, 2), (
            trajectory.messages
        )
        harm, said, _ = trajectory.messages[-3:]
        assert any(word in said["content"] for word in ("Error", "rror:", "out of time")), (harm, said)
        trained = [token for token, mask in zip(trajectory.tokens, trajectory.mask, strict=True) if mask]
        assert said["content"][2:20] not in chat.tokenizer.decode(trained)
