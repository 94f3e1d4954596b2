"""A rank of Transformer Engine layers trains: passes through megatron-core's schedule, and optimizer steps.

Python of Transformer Engine and megatron-core is real (`te`), kernels are plain torch (`te_kernels`, `te_fp8_kernels`,
`te_adam`), ranks are processes on gloo, started by `programs.run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.schema import PolicyConfig
from tests.cuda import programs
from tests.cuda.programs import Case

STEPS = 3


@dataclass(frozen=True)
class Answer:
    """Results of a policy."""

    steps: list[dict[str, float]]
    """Metrics of each optimizer step."""
    weights: dict[str, Any]
    """Weights by parameter name, numpy; FP8 numbers as uint8."""
    logprobs: list[Any] | None
    """Log-probs of the micro-batches after the steps."""


def batch(model: Path) -> Any:
    """Returns the training batch."""
    import json

    from tests.megatron import layouts

    return layouts.some_batch(json.loads((model / "config.json").read_text())["vocab_size"], count=10)


def go(case: Case, waits: Any) -> list[Answer]:
    """Takes optimizer steps with each policy."""
    import json

    import torch

    from skyrl_mega.megatron import model, objectives
    from skyrl_mega.megatron.fp8_parameters import storage_tensors
    from skyrl_mega.megatron.worker import ModelWorker
    from tests.cuda.syncs import AsCuda, Counted, CudaAsCpu, mark_device
    from tests.megatron import layouts

    programs.join(case)
    hf = json.loads((case.model / "config.json").read_text())

    def plain(t: Any) -> Any:
        whole = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.float()
        return whole.detach().clone().numpy()

    def answer(policy: PolicyConfig) -> Answer:
        with CudaAsCpu(), Counted(waits):
            opened = ModelWorker(hf, policy, case.parallel, dtype=torch.bfloat16, device=layouts.CPU)
            opened.load(case.model)
        for chunk in map(model.unwrap_gpt, opened.chunks):
            mark_device([*chunk.parameters(), *storage_tensors(chunk.parameters()), *chunk.buffers()])
        _, micros = layouts.deal(batch(case.model), opened)
        with AsCuda():
            steps = [opened.train(micros, objectives.supervised) for _ in range(STEPS)]
            logprobs = opened.logprobs(micros)
        weights = {name: plain(t) for name, t in opened.weights().items()}
        return Answer(steps, weights, logprobs and [values.numpy() for values, _ in logprobs])

    return [answer(policy) for policy in case.policies]
