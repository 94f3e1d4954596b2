"""Cases for the fused head on any device: numbers and gradients equal torch's log_softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from skyrl_mega.kernels import linear_logprobs as head_of
from skyrl_mega.kernels.linear_logprobs import Head, Inputs


@dataclass(frozen=True)
class Case:
    """Inputs of a head, split over tensor ranks that run in sequence."""

    tokens: int = 9
    width: int = 16
    vocab: int = 300
    ranks: int = 1
    temperature: float = 1.0
    soft_cap: float | None = None
    scale: float = 1.0
    """Scale of the logits."""
    padding: int = 0
    """Lower bound of the weight's padding columns after the vocabulary; the content of padding must not matter."""
    floor: bool = False
    """True if every other token's distribution is cut to a support; the last support is the target alone."""
    entropy: bool = True
    """True if the loss includes the entropy."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Returns hidden [T, H], weight [ranks · v, H], targets [T], floor [T], upstream [2, T], float64 on the CPU."""
        g = torch.Generator().manual_seed(self.tokens * 1009 + self.vocab)
        width = -(-(self.vocab + self.padding) // self.ranks)
        hidden = torch.randn(self.tokens, self.width, generator=g, dtype=torch.float64)
        weight = torch.randn(width * self.ranks, self.width, generator=g, dtype=torch.float64)
        weight *= self.scale * self.width**-0.5
        weight[self.vocab :] = 50.0
        targets = torch.randint(0, self.vocab, (self.tokens,), generator=g)
        floor = None
        if self.floor:
            floor = torch.full((self.tokens,), float("-inf"), dtype=torch.float64)
            floor[::2] = self.scale / self.temperature * 0.3
            floor[-1] = float("inf")
        return hidden, weight, targets, floor, torch.randn(2, self.tokens, generator=g, dtype=torch.float64)


@dataclass
class Answer:
    """Outputs of a head: log-probs, entropies, Σ p² and gradients; the weight's gradient is joined over ranks."""

    logprobs: Tensor
    entropy: Tensor
    squares: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def expected(case: Case, dtype: torch.dtype) -> Answer:
    """Returns the outputs by autograd, from inputs rounded to `dtype`."""
    hidden, weight, targets, floor, (of_logprobs, of_entropy) = case.tensors()
    hidden, weight = hidden.to(dtype).double().requires_grad_(), weight.to(dtype).double().requires_grad_()
    logits = hidden @ weight[: case.vocab].T
    if case.soft_cap is not None:
        logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
    logits = logits / case.temperature
    if floor is not None:
        kept = logits >= floor.to(dtype).double()[:, None]
        kept[range(len(targets)), targets] = True
        logits = logits.masked_fill(~kept, float("-inf"))
    table = logits.log_softmax(-1)
    logprobs = table[range(len(targets)), targets]
    entropy = -(table.exp() * torch.where(table.isinf(), 0.0, table)).sum(-1)
    learned = (logprobs * of_logprobs).sum() + (entropy * of_entropy).sum() * case.entropy
    grads = torch.autograd.grad(learned, (hidden, weight))
    return Answer(logprobs.detach(), entropy.detach(), table.exp().square().sum(-1).detach(), *grads)


def answered(case: Case, dtype: torch.dtype, device: str, *, by_kernel: bool) -> Answer:
    """Returns the outputs of `linear_logprobs`, rank after rank, in float64 on the CPU."""
    hidden, weight, targets, floor, upstream = case.tensors()
    precise = head_of.precise(dtype)
    width = len(weight) // case.ranks
    inputs = [
        Inputs(
            hidden.to(device, dtype),
            weight[rank * width : (rank + 1) * width].to(device, dtype),
            targets.to(device),
            Head(min(width, max(0, case.vocab - rank * width)), rank * width, case.temperature, case.soft_cap),
            None if floor is None else floor.to(device, precise),
        )
        for rank in range(case.ranks)
    ]
    of_logprobs, of_entropy = upstream.to(device, precise)
    with mock.patch.object(Inputs, "by_kernel", by_kernel):
        parts = [head_of.merge(head_of.partial_sums(each, squares=True)) for each in inputs]
        logprobs, squares, saved = head_of.finish(head_of.merge(torch.stack(parts, 1)))
        assert squares is not None
        of = (of_logprobs, of_entropy if case.entropy else None)
        grads = [head_of.gradients(each, saved, *of) for each in inputs]
    assert logprobs.dtype == saved.entropy_T.dtype == precise and grads[0][0].dtype == grads[0][1].dtype == dtype
    outputs = (logprobs, saved.entropy_T, squares, sum(g.double() for g, _ in grads), torch.cat([g for _, g in grads]))
    return Answer(*(each.double().cpu() for each in outputs if isinstance(each, Tensor)))


def like_autograd(case: Case, dtype: torch.dtype, device: str, *, by_kernel: bool, near: float) -> None:
    """Compares all outputs within `near`: absolute for values of order 1, else relative."""
    actual, wanted = answered(case, dtype, device, by_kernel=by_kernel), expected(case, dtype)
    for name, value in vars(wanted).items():
        other = vars(actual)[name]
        size = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        assert other.shape == value.shape, name
        off = float((other - value).abs().max()) if value.numel() else 0.0
        assert off <= near * size, f"{name} of {case}: off by {off:.2g} where numbers are up to {size:.2g}"
    assert not actual.grad_weight[case.vocab :].any()


RAGGED = [
    Case(),
    Case(tokens=70, width=33, vocab=291, temperature=0.7),
    Case(tokens=5, width=8, vocab=700, ranks=2, soft_cap=2.0, scale=3.0, entropy=False),
    Case(tokens=130, width=40, vocab=261, ranks=4, padding=7, temperature=1.3, floor=True),
    Case(tokens=3, width=64, vocab=10, ranks=4, padding=118, soft_cap=5.0, floor=True),  # some ranks hold only padding
    Case(tokens=1, width=1, vocab=1),
    Case(tokens=6, width=20, vocab=600, ranks=2, scale=1e4),
    Case(tokens=0, width=8, vocab=20, ranks=2),
    Case(tokens=30, width=8, vocab=1400, padding=3),  # two chunks of the backward pass
]


def extremes_are_exact(device: str, dtype: torch.dtype, *, by_kernel: bool) -> None:
    """Checks logits of ±10⁴ with three equal ones: ln 3 to float32's last places, although logits resolve only 10⁻³."""
    vocab, width = 520, 8
    weight = torch.full((vocab, width), -1e4, dtype=torch.float64)
    weight[[3, 270, 519]] = 1e4
    hidden = torch.zeros(4, width, dtype=torch.float64)
    hidden[:, 0] = 1.0
    hidden[1] *= -1
    targets = torch.tensor([3, 5, 519, 5])
    inputs = Inputs(hidden.to(device, dtype), weight.to(device, dtype), targets.to(device), Head(vocab))
    with mock.patch.object(Inputs, "by_kernel", by_kernel):
        logprobs, _, saved = head_of.finish(head_of.merge(head_of.partial_sums(inputs)))
        ones = torch.ones_like(logprobs)
        grad_hidden, grad_weight = head_of.gradients(inputs, saved, ones, ones)
    few, most = torch.tensor(3.0).log(), torch.tensor(517.0).log()
    wanted = torch.stack([-few, -most, -few, -2e4 - few])
    torch.testing.assert_close(logprobs.cpu().float(), wanted, atol=2e-6, rtol=2e-7)
    entropy = torch.stack([few, most, few, few])
    torch.testing.assert_close(saved.entropy_T.cpu().float(), entropy, atol=2e-6, rtol=0)
    assert grad_hidden.isfinite().all() and grad_weight.isfinite().all()
    # Tokens 0, 2 and 3 add a third to all three columns, and two of these tokens subtract at their targets.
    pull = grad_weight[[3, 270, 519], 0].cpu().float()
    torch.testing.assert_close(pull, torch.tensor([0.0, -1.0, 0.0]), atol=1e-5, rtol=0)


LARGE = Case(tokens=300, width=2048, vocab=20_001, ranks=2, temperature=0.7, soft_cap=30.0, padding=9, floor=True)
NEAR = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
ON_A_GPU = [
    (case, dtype, near)
    for dtype, near in NEAR.items()
    for case in (*RAGGED, LARGE)
    if case.scale < 1e4  # at such a scale rounding changes the gradients
]
"""Cases with a GPU's dtypes, and the tolerance of the kernels' numbers."""
