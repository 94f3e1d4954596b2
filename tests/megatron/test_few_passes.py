"""Tests of the norm and the rotation of `policy.spec=local` against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skyrl_mega.megatron.norms import rms_norm
from skyrl_mega.megatron.rotation import Rotation

EPS = 1e-5


def gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the gradients of a weighted sum of `out` in the inputs."""
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    return [*torch.autograd.grad((out * weights).sum(), inputs)]


def near(ours: Tensor, exact: Tensor) -> None:
    """Asserts equality to float32's rounding, relative to the largest number."""
    assert (ours.double() - exact).abs().max() < 2e-6 * exact.abs().max()


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("shape", [(50, 1, 64), (7, 1, 3, 16), (1, 5), (0, 1, 8)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_norm_follows_its_formula(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * scale).requires_grad_(), torch.randn(shape[-1]).requires_grad_()
    exact = tuple(t.detach().double().requires_grad_() for t in (x, weight))
    ours, truth = rms_norm(x, weight, EPS), exact_norm(*exact)
    assert ours.shape == x.shape and ours.dtype == torch.float32
    if x.numel():
        near(ours, truth)
        for a, b in zip(gradients(ours, (x, weight)), gradients(truth, exact), strict=True):
            near(a, b)


def test_the_norm_takes_a_part_of_a_tensor() -> None:
    torch.manual_seed(0)
    whole = torch.randn(20, 1, 4, 24).requires_grad_()
    weight = torch.randn(8)
    part = whole[..., 8:16]
    assert not part.is_contiguous()
    exact = whole.detach().double().requires_grad_()
    ours, truth = rms_norm(part, weight, EPS), exact_norm(exact[..., 8:16], weight.double())
    near(ours, truth)
    near(gradients(ours, (whole,))[0], gradients(truth, (exact,))[0])


def test_a_row_of_zeros_has_a_finite_norm() -> None:
    x, weight = torch.zeros(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    out = rms_norm(x, weight, EPS)
    assert not out.any()
    assert gradients(out, (x,))[0].isfinite().all()


def test_other_types_take_torchs_norm() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    assert rms_norm(x, weight, EPS).equal(torch.nn.functional.rms_norm(x, (8,), weight, EPS))


@pytest.mark.parametrize(("width", "rotated"), [(16, 16), (24, 8)])
def test_queries_turn_like_complex_numbers(width: int, rotated: int) -> None:
    torch.manual_seed(0)
    half, scale = rotated // 2, 1.3
    frequencies = torch.rand(half, dtype=torch.float64)
    table = torch.outer(torch.arange(40, dtype=torch.float64), frequencies)
    positions = torch.tensor([0, 1, 2, 7, 39, 3, 0])
    rotation = Rotation.of(torch.cat([table, table], -1)[:, None, None].float(), positions, scale, torch.float32)
    x = torch.randn(len(positions), 3, width).requires_grad_()
    exact = x.detach().double().requires_grad_()
    pairs = torch.complex(exact[..., :half], exact[..., half:rotated])
    turned = pairs * torch.polar(torch.tensor(scale, dtype=torch.float64), table[positions])[:, None]
    truth = torch.cat([turned.real, turned.imag, exact[..., rotated:]], -1)
    ours = rotation(x)
    near(ours, truth)
    near(gradients(ours, (x,))[0], gradients(truth, (exact,))[0])
