"""The critic's loss and gradient against the plain formula, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.losses.value import ValueInputs, value


def by_hand(
    values: list[float], old: list[float], returns: list[float], weights: list[float], clip: float | None
) -> tuple[float, list[float], float]:
    """Returns the loss, the derivative by each value, and the weight of clipped tokens."""
    loss, slope, share = 0.0, [], 0.0
    for v, o, r, w in zip(values, old, returns, weights, strict=True):
        if w == 0:
            slope.append(0.0)
            continue
        plain, gradient = (v - r) ** 2, 2 * (v - r)
        if clip is not None:
            near = min(max(v, o - clip), o + clip)
            if (near - r) ** 2 > plain:
                plain, gradient = (near - r) ** 2, 0.0 if near != v else gradient
                share += w
        loss += 0.5 * w * plain
        slope.append(0.5 * w * gradient)
    return loss, slope, share


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_value_loss_is_the_clipped_square(clip: float | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 60
    values, old, returns = rng.normal(size=(3, n))
    weights = rng.random(n) * (rng.random(n) < 0.6)
    returns[weights == 0] = math.nan
    old[weights == 0] = math.nan
    loss, slope, share = by_hand(values.tolist(), old.tolist(), returns.tolist(), weights.tolist(), clip)

    v = torch.tensor(values, requires_grad=True)
    given = ValueInputs(
        values_L=v, weights_L=torch.tensor(weights), old_L=torch.tensor(old), returns_L=torch.tensor(returns)
    )
    actual, metrics = value(given, clip)
    actual.backward()
    assert v.grad is not None
    assert actual.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(v.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
    assert metrics["clip_fraction"].item() == pytest.approx(share, rel=1e-9, abs=1e-12)
    assert metrics["value"].item() == pytest.approx(float((weights * values).sum()), rel=1e-9)
    assert (share > 0) == (clip is not None)


def test_without_a_token_the_loss_is_0() -> None:
    nothing = torch.full((4,), math.nan)
    v = torch.ones(4, requires_grad=True)
    loss, _ = value(ValueInputs(values_L=v, weights_L=torch.zeros(4), old_L=nothing, returns_L=nothing), 0.2)
    loss.backward()
    assert v.grad is not None
    assert loss.item() == 0 and not v.grad.any()
