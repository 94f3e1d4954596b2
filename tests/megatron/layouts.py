"""Steps of a rank in the layout tests: join, load, compute log-probs, take optimizer steps."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from skyrl_mega.config.schema import LayoutConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.megatron import cpu, model, objectives
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.registry import HeadKind
from skyrl_mega.parallel.balance import balance
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def open_rank(
    rank: int,
    address: str,
    path: Path,
    parallel: ParallelDims,
    policy: PolicyConfig,
    dtype: torch.dtype = torch.float32,
    head: HeadKind = "vocab",
) -> ModelWorker:
    """Opens a rank on gloo and loads the model."""
    join_ranks(rank, address, parallel)
    return load_model(path, parallel, policy, dtype, head)


def join_ranks(rank: int, address: str, parallel: ParallelDims) -> None:
    """Joins a rank to the others on gloo."""
    torch.set_num_threads(1)
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), parallel.ranks, is_master=rank == 0, timeout=timedelta(seconds=180))
    model.join(rank, parallel, store, CPU, 120)


def load_model(
    path: Path,
    parallel: ParallelDims,
    policy: PolicyConfig,
    dtype: torch.dtype = torch.float32,
    head: HeadKind = "vocab",
) -> ModelWorker:
    """Builds and loads a joined rank's part of a model."""
    hf = read_config(path)
    opened = ModelWorker(hf, policy, parallel, dtype=dtype, device=CPU, head=head)
    opened.load(path)
    return opened


def deal(batch: Sequences, rank: ModelWorker) -> tuple[list[list[int]], list[Sequences]]:
    """Returns this rank's micro-batches: rows of the batch, and the sequences."""
    p = rank.parallel
    multiple = p.pipeline if p.virtual_pipeline > 1 else 1
    rows = balance(batch.lengths.tolist(), p.data, rank.policy.micro_tokens * p.context, multiple=multiple)
    mine = rows[p.coordinates(dist.get_rank()).dp]
    return mine, [batch.take(m) for m in mine]


def train(
    rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig, batch: Sequences, steps: int
) -> Any:
    """Returns losses and gradient norms of `steps` supervised steps on the same batch."""
    opened = open_rank(rank, address, path, parallel, policy)
    _, micros = deal(batch, opened)
    return [opened.train(micros, objectives.supervised) for _ in range(steps)]


def logprobs(
    rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig, batch: Sequences
) -> Any:
    """Returns rows and (log-probs, entropy) of this rank's sequences."""
    opened = open_rank(rank, address, path, parallel, policy)
    rows, micros = deal(batch, opened)
    answer = opened.logprobs(micros)
    at = parallel.coordinates(rank)
    return None if answer is None or at.tp or at.cp else list(zip(rows, answer, strict=True))


def policy_logprobs(path: Path, batch: Sequences, ranks: int = 1, **sizes: int) -> np.ndarray:
    """Returns the batch's log-probs [T], computed by real ranks in the layout of these sizes."""
    answers = run_ranks(ranks, logprobs, path, layout(ranks, **sizes), policy_config(micro_tokens=400), batch)
    values_T = np.full(len(batch.tokens), np.nan)
    for answer in answers:
        for rows, (values, _) in answer or []:
            values_T[batch.index(rows).numpy()] = values
    return values_T


def some_batch(vocab: int, count: int = 13, longest: int = 40, seed: int = 0) -> Sequences:
    """Returns random sequences of random lengths, with random weights that sum to 1."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, count)
    batch = Sequences.of([rng.integers(0, vocab, n) for n in lengths])
    weights = rng.random(len(batch.tokens)).astype(np.float32)
    weights[batch.starts.numpy()] = 0
    batch["weights"] = torch.from_numpy(weights / weights.sum())
    return batch


def policy_config(**changes: Any) -> PolicyConfig:
    """Returns settings with small micro-batches and a learning rate large enough to change the second step's loss."""
    values: dict[str, Any] = dict(micro_tokens=64, logit_chunk=16, optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.5))
    return PolicyConfig(**{**values, **changes})


def layout(ranks: int, **sizes: Any) -> ParallelDims:
    """Returns a layout of the given sizes."""
    return ParallelDims.from_config(LayoutConfig(**sizes), ranks)
