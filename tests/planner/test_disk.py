"""The planned size of a checkpoint against a real checkpoint, from two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.models import char_tokenizer as characters
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.host_memory import disk
from tests.megatron import layouts
from tests.support.ranks import run_ranks

MODEL = BuildConfig(layers=2, hidden=256, expert_ffn=256)
VOCABULARY = len(characters.VOCABULARY)


def save(rank: int, address: str, path: Path, parallel: ParallelDims, folder: Path, dtype: torch.dtype) -> Any:
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(), dtype)
    opened.save(folder)


@pytest.mark.parametrize(
    ("ranks", "sizes", "dtype"),
    [(1, {}, torch.float32), (2, {"expert": 2}, torch.bfloat16)],
    ids=["alone float32", "EP2 bfloat16"],
)
def test_a_checkpoint_is_as_large_as_it_is_said_to_be(
    ranks: int, sizes: dict[str, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    build(MODEL, tmp_path / "model")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run_ranks(ranks, save, tmp_path / "model", layouts.layout(ranks, **sizes), folder, dtype)
    config = Config()
    config.model.dtype = str(dtype).removeprefix("torch.")
    hf = hf_config(MODEL)
    planned = disk(config, architecture(hf).describe(hf))
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert planned.checkpoint == pytest.approx(written, rel=0.03)
    assert planned.kept == 3 * planned.checkpoint
    config.algorithm.advantage = "gae"
    with_critic = disk(config, architecture(hf).describe(hf))
    less = 12 * (VOCABULARY - 1) * MODEL.hidden  # a single row in place of the output projection
    assert with_critic.checkpoint == 2 * planned.checkpoint - less and with_critic.export == planned.export
