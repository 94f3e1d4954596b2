"""Tests of Transformer Engine's classes with each recipe of `policy.precision`: accepted, with the documented
settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config import precision
from skyrl_mega.config.schema import PrecisionConfig
from tests.cuda import te

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

ROOT = Path(__file__).resolve().parents[2]
ASKED: list[dict[str, Any]] = [
    {"recipe": "fp8_blockwise", "first_layers": 1, "last_layers": 2},
    {"recipe": "fp8_current"},
    {"recipe": "mxfp8", "last_layers": 1},
]


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Returns the answers by recipe, from one process with the variables of all recipes."""
    variables: dict[str, str] = {}
    for fields in ASKED:
        variables |= precision.environment(PrecisionConfig(**fields))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cuda.recipes"],
        input=json.dumps(ASKED),
        cwd=ROOT,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    descriptions = json.loads(ran.stdout.partition("\nanswers ")[2].splitlines()[0])
    return {fields["recipe"]: answer for fields, answer in zip(ASKED, descriptions, strict=True)}


def test_recipes_and_formats(answers: dict[str, dict[str, Any]]) -> None:
    assert {name: (of["recipe"], of["format"]) for name, of in answers.items()} == {
        "fp8_blockwise": ("Float8BlockScaling", "E4M3"),
        "fp8_current": ("Float8CurrentScaling", "HYBRID"),
        "mxfp8": ("MXFP8BlockScaling", "E4M3"),
    }


def test_scales_are_those_of_the_wire_and_of_the_emulation(answers: dict[str, dict[str, Any]]) -> None:
    """Checks float32 scales for blocks and powers of two for tensors; the defaults are the opposite."""
    assert answers["fp8_blockwise"]["powers"] == [False] * 3
    assert answers["fp8_current"]["powers"] == [True] * 3


def test_layers_in_another_precision(answers: dict[str, dict[str, Any]]) -> None:
    assert {name: of["fp8"] for name, of in answers.items()} == {
        "fp8_blockwise": [False, True, False, False],
        "fp8_current": [True] * 4,
        "mxfp8": [True, True, True, False],
    }


@pytest.mark.parametrize("recipe", [one["recipe"] for one in ASKED])
def test_only_linear_layers_have_numbers_of_their_own(answers: dict[str, dict[str, Any]], recipe: str) -> None:
    """Checks for FP8 weights in linear layers only (no router, head or norm), unchanged dtypes of parameters, and
    padding of experts' tokens in the grouped layer."""
    answer = answers[recipe]
    assert answer["linear"] == ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"]
    assert answer["attention"] is False
    assert answer["copies"], "what `megatron.precision.drop_fp8_copies` empties is called otherwise"
    assert answer["padded"] == ["quantization_padding", "quantization_unpadding"]
    assert answer["routed_padding"] is False
    assert answer["types"] == ["torch.bfloat16"]
