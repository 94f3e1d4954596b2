"""The chunked, vocabulary-parallel head against torch's log_softmax in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

T, H, VOCAB = 37, 16, 21


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [T, H], weight [VOCAB, H], targets [T], upstream gradient [T], in float64."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, H, generator=g, dtype=torch.float64)
    return hidden, weight, torch.randint(0, VOCAB, (T,), generator=g), torch.rand(T, generator=g, dtype=torch.float64)


def one_rank(rank: int, address: str, ranks: int, temperature: float, chunk: int) -> Any:
    from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs

    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=ranks)
    hidden, weight, targets, upstream = tensors()
    width = -(-VOCAB // ranks)
    padded = torch.full((width * ranks, H), 7.0, dtype=torch.float64)  # padding must not matter, whatever it holds
    padded[:VOCAB] = weight
    hidden_ = hidden.float().requires_grad_()
    local = padded[rank * width : (rank + 1) * width].float().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    logp, entropy = vocab_parallel_logprobs(
        hidden_, local, targets, vocab=VOCAB, temperature=temperature, chunk=chunk, group=group
    )
    (logp * upstream.float()).sum().backward()
    grad = hidden_.grad
    assert grad is not None
    dist.all_reduce(grad)
    return logp.detach().numpy(), entropy.numpy(), grad.numpy(), local.grad.numpy()  # type: ignore[union-attr]


@pytest.mark.parametrize(("ranks", "temperature", "chunk"), [(1, 1.0, 1000), (1, 0.7, 5), (2, 1.0, 8), (4, 1.3, 37)])
def test_head_equals_log_softmax(ranks: int, temperature: float, chunk: int) -> None:
    hidden, weight, targets, upstream = tensors()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_softmax = torch.log_softmax(hidden @ weight.T / temperature, -1)
    expected = log_softmax.gather(1, targets[:, None])[:, 0]
    (expected * upstream).sum().backward()
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    assert hidden.grad is not None and weight.grad is not None

    answers = run_ranks(ranks, one_rank, ranks, temperature, chunk)
    for logp, ent, grad, _ in answers:
        torch.testing.assert_close(torch.from_numpy(logp).double(), expected.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.from_numpy(ent).double(), entropy.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.from_numpy(grad).double(), hidden.grad, atol=1e-5, rtol=1e-4)
    whole = torch.cat([torch.from_numpy(a[3]) for a in answers]).double()
    torch.testing.assert_close(whole[:VOCAB], weight.grad, atol=1e-5, rtol=1e-4)
    assert whole[VOCAB:].abs().max() == 0 if len(whole) > VOCAB else True
