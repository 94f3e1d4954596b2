"""`model.max_length` above the length in config.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.tiny import build

SCRIPT = """
import sys
from vllm.engine.arg_utils import EngineArgs
from skyrl_mega.config.schema import Config
from skyrl_mega.trainer.start_actors import length_arguments

for longest in map(int, sys.argv[2:]):
    config = Config()
    config.model.max_length = longest or None
    arguments = {"model": sys.argv[1], "dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True}
    try:
        made = EngineArgs(**arguments, **length_arguments(config)).create_model_config()
        print(longest, "made for", made.max_model_len)
    except ValueError as error:
        print(longest, *str(error).split())
"""


@pytest.mark.slow
def test_vllm_takes_the_length_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build(BuildConfig(architecture="qwen2", heads=2, max_length=64), path)

    command = [sys.executable, "-c", SCRIPT, str(path), "0", "256"]  # one process: vLLM's import takes ten seconds
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    without, with_it = done.stdout.splitlines()
    assert without.startswith("0 ") and "max_model_len (128) is greater" in without
    assert with_it == "256 made for 128"
