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

config = Config()
config.model.max_length = int(sys.argv[2]) or None
arguments = {"model": sys.argv[1], "dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True}
print("made for", EngineArgs(**arguments, **length_arguments(config)).create_model_config().max_model_len)
"""


@pytest.mark.slow
def test_vllm_takes_the_length_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build(BuildConfig(architecture="qwen2", heads=2, max_length=64), path)

    def said(longest: int) -> str:
        command = [sys.executable, "-c", SCRIPT, str(path), str(longest)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240)
        return result.stdout + result.stderr

    assert "max_model_len (128) is greater" in said(0)
    assert "made for 128" in said(256)
