"""Memory of the output head: the choice of the head, and the bytes of either head."""

from __future__ import annotations

import pytest

from skyrl_mega.config.derived import logit_chunk
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import logits


@pytest.mark.parametrize(
    ("head", "cpu", "cuda"), [("auto", 512, None), ("fused", None, None), ("chunked", 512, 512)], ids=str
)
def test_which_head_a_device_has(head: str, cpu: int | None, cuda: int | None) -> None:
    policy = PolicyConfig(head=head, logit_chunk=512)
    assert (logit_chunk(policy, "cpu"), logit_chunk(policy, "cuda")) == (cpu, cuda)


@pytest.mark.parametrize(("model", "hidden"), [("Qwen/Qwen3-30B-A3B", 2048), ("Qwen/Qwen3-235B-A22B", 4096)])
@pytest.mark.parametrize("tensor", [1, 4])
def test_the_fused_heads_bytes(model: str, hidden: int, tensor: int) -> None:
    hf = known(model)
    d, parallel = architecture(hf).describe(hf), ParallelDims(tensor, tensor=tensor)
    tokens, rows = 8192, 151936 // tensor
    backward, forward = logits(d, parallel, tokens, 2, None)
    splits = -(-rows // (-(-rows // (33 * 256)) * 256))
    assert forward == 5 * 4 * splits * tokens
    # A chunk as wide as the hidden states in bfloat16, its gradient in float32, and the weight's gradient in bfloat16,
    # twice if added to another gradient.
    work, weight = tokens * hidden * (2 + 4), rows * hidden * 2
    assert backward == max(work + weight, 2 * weight)
    chunked = logits(d, parallel, tokens, 2, 1024)
    assert forward < chunked[1] / 20 and backward < chunked[0]
