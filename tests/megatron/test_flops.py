"""FLOPs by the model's shapes, against those that torch counts while a rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from skyrl_mega.megatron import objectives
from skyrl_mega.megatron.sequences import Sequences
from tests.megatron import layouts


def counts(rank: int, address: str, path: Path, batch: Sequences) -> Any:
    """Operations by operator: of log-probs, and of an optimizer step."""
    opened = layouts.open_rank(rank, address, path, layouts.layout(1), layouts.policy_config(micro_tokens=4096))
    _, micros = layouts.deal(batch, opened)
    found = []
    for compute in (lambda: opened.logprobs(micros), lambda: opened.train(micros, objectives.supervised)):
        with FlopCounterMode(display=False) as counter:
            compute()
        found.append({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})
    return found
