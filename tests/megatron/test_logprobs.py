"""Tests of the vocabulary-parallel head, chunked and fused, against torch's log_softmax: values and gradients of
log-probs and entropy, and squared probabilities. A chunk of None selects the fused head."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

T, H, VOCAB = 37, 16, 21


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden [T, H], weight [VOCAB, H], targets [T], upstream gradients [T] of log-probs and entropy, in
    float64."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, H, generator=g, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (T,), generator=g)
    upstream, of_entropy = torch.randn(2, T, generator=g, dtype=torch.float64)
    return hidden, weight, targets, upstream, of_entropy


def learned(logp: torch.Tensor, entropy: torch.Tensor, of: str) -> torch.Tensor:
    """Returns a loss of log-probs, entropy, or both."""
    _, _, _, upstream, of_entropy = tensors()
    parts = {"logprobs": (logp * upstream.to(logp)).sum(), "entropy": (entropy * of_entropy.to(logp)).sum()}
    return sum((parts[name] for name in of.split(" and ")), torch.zeros((), dtype=logp.dtype))


def one_rank(
    rank: int, address: str, ranks: int, temperature: float, chunk: int | None, of: str, dtype: torch.dtype
) -> Any:
    from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs

    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=ranks)
    hidden, weight, targets, _, _ = tensors()
    width = -(-VOCAB // ranks)
    padded = torch.full((width * ranks, H), 7.0, dtype=torch.float64)  # the content of padding must not matter
    padded[:VOCAB] = weight
    hidden_ = hidden.to(dtype, copy=True).requires_grad_()
    local = padded[rank * width : (rank + 1) * width].to(dtype, copy=True).requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    logp, entropy = vocab_parallel_logprobs(
        hidden_, local, targets, vocab=VOCAB, temperature=temperature, chunk=chunk, group=group
    )
    learned(logp, entropy, of).backward()
    grad = hidden_.grad
    assert grad is not None
    dist.all_reduce(grad)
    return logp.detach().numpy(), entropy.detach().numpy(), grad.numpy(), local.grad.numpy()  # type: ignore[union-attr]


def squares(rank: int, address: str, ranks: int, temperature: float, chunk: int | None, dtype: torch.dtype) -> Any:
    """Returns sums of squared probabilities, their `requires_grad`, equality with a call without squares, and True if
    the hidden states have a gradient."""
    from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs

    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=ranks)
    hidden, weight, targets, _, _ = tensors()
    width = -(-VOCAB // ranks)
    padded = torch.full((width * ranks, H), 7.0, dtype=torch.float64)
    padded[:VOCAB] = weight
    hidden_, local = hidden.to(dtype).requires_grad_(), padded[rank * width : (rank + 1) * width].to(dtype)
    group = dist.group.WORLD
    assert group is not None
    settings: dict[str, Any] = {"vocab": VOCAB, "temperature": temperature, "chunk": chunk, "group": group}
    logp, entropy, sums = vocab_parallel_logprobs(hidden_, local, targets, **settings, squares=True)
    logp.sum().backward()
    without = vocab_parallel_logprobs(hidden_, local, targets, **settings)
    same = len(without) == 2 and all(torch.allclose(a, b) for a, b in zip(without, (logp, entropy), strict=True))
    assert hidden_.grad is not None
    return sums.detach().numpy(), sums.requires_grad, same, bool(hidden_.grad.any())


EXACT, ROUNDED = 1e-9, 1e-5


@pytest.mark.parametrize(
    ("ranks", "temperature", "chunk", "of", "dtype"),
    [
        (1, 1.0, 1000, "logprobs", torch.float64),
        (1, 0.7, 5, "logprobs and entropy", torch.float64),
        (2, 1.0, 8, "entropy", torch.float64),
        (2, 1.0, 8, "logprobs and entropy", torch.float32),
        (4, 1.3, 37, "logprobs and entropy", torch.float64),
        (1, 0.7, None, "logprobs", torch.float64),
        (2, 0.7, None, "entropy", torch.float64),
        (2, 1.0, None, "logprobs and entropy", torch.float32),
        (4, 1.3, None, "logprobs and entropy", torch.float64),
    ],
)
def test_head_equals_log_softmax(
    ranks: int, temperature: float, chunk: int | None, of: str, dtype: torch.dtype
) -> None:
    hidden, weight, targets, _, _ = tensors()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_softmax = torch.log_softmax(hidden @ weight.T / temperature, -1)
    expected = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    learned(expected, entropy, of).backward()
    assert hidden.grad is not None and weight.grad is not None

    near = EXACT if dtype == torch.float64 else ROUNDED
    answers = run_ranks(ranks, one_rank, ranks, temperature, chunk, of, dtype)
    for logp, ent, grad, _ in answers:
        torch.testing.assert_close(torch.from_numpy(logp).double(), expected.detach(), atol=near, rtol=near)
        torch.testing.assert_close(torch.from_numpy(ent).double(), entropy.detach(), atol=near, rtol=near)
        torch.testing.assert_close(torch.from_numpy(grad).double(), hidden.grad, atol=near, rtol=10 * near)
    whole = torch.cat([torch.from_numpy(a[3]) for a in answers]).double()
    torch.testing.assert_close(whole[:VOCAB], weight.grad, atol=near, rtol=10 * near)
    assert whole[VOCAB:].abs().max() == 0 if len(whole) > VOCAB else True


@pytest.mark.parametrize(
    ("ranks", "temperature", "chunk", "dtype"),
    [
        (1, 1.0, 5, torch.float64),
        (2, 0.7, 8, torch.float64),
        (2, 1.0, 100, torch.float32),
        (4, 1.3, 37, torch.float64),
        (1, 1.0, None, torch.float32),
        (2, 0.7, None, torch.float64),
    ],
)
def test_squares_are_sums_over_the_whole_vocabulary(
    ranks: int, temperature: float, chunk: int | None, dtype: torch.dtype
) -> None:
    hidden, weight, _, _, _ = tensors()
    logits = hidden @ weight.T / temperature
    expected = (torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1)).exp()
    torch.testing.assert_close(expected, torch.softmax(logits, -1).square().sum(-1))
    near = EXACT if dtype == torch.float64 else ROUNDED
    for sums, has_gradient, same, others_have in run_ranks(ranks, squares, ranks, temperature, chunk, dtype):
        torch.testing.assert_close(torch.from_numpy(sums).double(), expected, atol=near, rtol=near)
        assert not has_gradient and same and others_have


def head_products(rank: int, address: str) -> list[int]:
    """Returns the number of products of hidden states and head in a forward and backward pass with one chunk and with
    several, and without a gradient."""
    from skyrl_mega.megatron import vocab_parallel

    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=1)
    hidden, weight, targets, _, _ = tensors()
    counts = []
    for chunk, gradient in ((len(hidden), True), (len(hidden) // 2 + 1, True), (len(hidden), False)):
        with (
            mock.patch.object(vocab_parallel, "_logits", side_effect=vocab_parallel._logits) as computed,
            torch.set_grad_enabled(gradient),
        ):
            settings: dict[str, Any] = {"vocab": VOCAB, "temperature": 1.0, "chunk": chunk, "group": dist.group.WORLD}
            logp, _ = vocab_parallel.vocab_parallel_logprobs(
                hidden.detach().requires_grad_(), weight, targets, **settings
            )
            if gradient:
                logp.sum().backward()
        counts.append(computed.call_count)
    return counts


def test_one_chunk_keeps_its_logits_and_several_compute_theirs_again() -> None:
    assert run_ranks(1, head_products) == [[1, 4, 1]]
