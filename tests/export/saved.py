"""Checkpoints of real policy ranks, in the folder of a run, and the ranks' own log-probs."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

from skyrl_mega.config.schema import MoeConfig
from skyrl_mega.megatron import cpu, model, objectives
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trainer.checkpoints import Checkpoints
from tests.megatron import layouts
from tests.support.ranks import run_ranks

BATCH = layouts.some_batch(100, count=6, longest=24)


def save(
    rank: int, address: str, run: Path, folder: Path, parallel: ParallelDims, dtype: torch.dtype, steps: int
) -> Any:
    """Trains, saves to `folder`, exports like a run; returns this rank's log-probs, if any."""
    torch.set_num_threads(1)
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), parallel.ranks, is_master=rank == 0, timeout=timedelta(seconds=180))
    model.join(rank, parallel, store, layouts.CPU, 120)
    hf = json.loads((run / "model" / "config.json").read_text())
    frozen = dtype == torch.bfloat16
    policy = layouts.policy_config(micro_tokens=400, moe=MoeConfig(freeze_router=frozen))
    opened = ModelWorker(hf, policy, parallel, dtype=dtype, device=layouts.CPU)
    opened.load(run / "model")
    rows, micros = layouts.deal(BATCH, opened)
    for _ in range(steps):
        opened.train(micros, objectives.supervised)
    opened.save(folder)
    opened.export(run / "in_run", run / "model")
    answer = opened.logprobs(micros) if steps else None
    at = parallel.coordinates(rank)
    return None if answer is None or at.tp or at.cp else list(zip(rows, answer, strict=True))


def make_run(run: Path, ranks: int, sizes: dict[str, Any], *, dtype: torch.dtype, steps: int) -> np.ndarray | None:
    """Writes the folder of a run with the model in `run/model`; returns the policy's log-probs of `BATCH` after `steps`
    steps.
    """
    config = {"run": {"directory": str(run.parent), "name": run.name}, "model": {"path": str(run / "model")}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    answers: list[Any] = []

    def save_policy(folder: Path) -> None:
        answers.extend(run_ranks(ranks, save, run, folder, layouts.layout(ranks, **sizes), dtype, steps))

    (run / "checkpoints").mkdir(exist_ok=True)
    Checkpoints(run / "checkpoints", keep=3).save(steps, {"step": steps}, {"policy": save_policy})
    if not steps:
        return None
    logprobs = np.full(len(BATCH.tokens), np.nan)
    for answer in answers:
        for rows, (values, _) in answer or []:
            logprobs[BATCH.index(rows)] = values
    return logprobs
