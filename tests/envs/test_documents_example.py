"""The documents' multiplication example: rows and environment pasted into a user's own file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.config.compose import compose
from skyrl_mega.data.rows import check_files, load_prompts
from skyrl_mega.envs import make
from tests.envs.test_contract import example_of_the_documents, loop_of_the_documents


def rows_of_the_documents(real_data: Path) -> list[dict[str, object]]:
    """Runs the documents' loop over examples, with the names required by the loop defined around it."""
    space: dict[str, object] = {
        "num_examples": 3,
        "num_digits": 1,
        "split_name": "train",
        "system_prompt": {"role": "system", "content": "Multiply."},
        "generate_multiplication_problem": lambda digits: ("2 * 3", 6),
        "examples": [],
    }
    exec(loop_of_the_documents(real_data), space)
    return space["examples"]  # type: ignore[return-value]


def test_rows_and_environment_by_name(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(rows_of_the_documents(real_data)), tmp_path / "train.parquet")
    imports = "import re\nfrom skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput\n\n"
    (tmp_path / "mine.py").write_text(imports + example_of_the_documents(real_data), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = compose(None, ["environment.classes.multiply=mine.py:MultiplyEnv"]).environment
    assert check_files(["train.parquet"], config) == 3
    prompt = load_prompts(["train.parquet"], config)[2]
    env = make(prompt.env_class, prompt.extras, config, 1)
    assert type(env).__module__.startswith("skyrl_mega_user_mine")
    assert env.step(r"\boxed{6}")["reward"] == 1.0 and env.step(r"\boxed{7}")["reward"] == 0.0
