"""The entropy bonus in the loss, and the coefficient over a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_mega.algorithms.entropy import EntropyCoefficient
from skyrl_mega.algorithms.losses import LOSSES, Figures, find
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.config.schema.entropy import EntropyConfig
from tests.algorithms.answers import packed, some_answers


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_bonus_of_each_token_at_its_weight(name: str) -> None:
    _, inputs = packed(some_answers([3, 1, 4], 5), [1, 2, 1], "sequences")
    entropy = torch.rand(len(inputs.old_L), dtype=torch.float64).requires_grad_()
    plain = replace(inputs, entropy_L=entropy, high_covariance_L=torch.zeros_like(inputs.active_L))
    without, _ = find(name)(plain, AlgorithmConfig(loss=name))
    expected = sum(w * h for w, h in zip(inputs.weights_L.tolist(), entropy.tolist(), strict=True))
    config = AlgorithmConfig(loss=name, entropy=EntropyConfig(coefficient=0.3))
    for given, coefficient in ((Figures(), 0.3), (Figures(entropy_coefficient=0.05), 0.05)):
        loss, metrics = find(name)(replace(plain, figures=given), config)
        (slope,) = torch.autograd.grad(loss, entropy, retain_graph=True)
        assert loss.item() == pytest.approx(without.item() - coefficient * expected, rel=1e-9)
        torch.testing.assert_close(slope, -coefficient * inputs.weights_L, rtol=1e-9, atol=1e-12)
        assert metrics["entropy"].item() == pytest.approx(expected, rel=1e-9) and not metrics["entropy"].requires_grad


def test_a_bonus_without_the_entropy_is_an_error() -> None:
    _, inputs = packed(some_answers([3], 5), [1], "tokens")
    with pytest.raises(ValueError, match="needs the policy's entropy"):
        find("ppo")(inputs, AlgorithmConfig(entropy=EntropyConfig(coefficient=0.3)))


def test_the_coefficient_moves_towards_the_target_and_rests_above_it() -> None:
    """Compares with Skywork-OR1: the coefficient grows by the step if the entropy is at most the target, else falls.

    The coefficient applies only at or below the target.
    """
    control = EntropyCoefficient(EntropyConfig(coefficient=0.0, target=0.5, step=0.01, most=0.025))
    seen = []
    for entropy in (0.6, 0.5, 0.4, 0.3, 0.2, 0.7, 0.7, 0.1):
        control.update(entropy)
        seen.append((round(control.coefficient, 6), round(control.applied, 6)))
    assert seen == [
        (0.0, 0.0),  # never below least
        (0.01, 0.01),
        (0.02, 0.02),
        (0.025, 0.025),  # never above most
        (0.025, 0.025),
        (0.015, 0.0),  # inactive above the target
        (0.005, 0.0),
        (0.015, 0.015),
    ]
    again = EntropyCoefficient(control.config)
    again.restore(control.state())
    assert (again.applied, again.entropy) == (control.applied, control.entropy) == (pytest.approx(0.015), 0.1)


def test_without_a_target_the_coefficient_is_the_settings() -> None:
    control = EntropyCoefficient(EntropyConfig(coefficient=0.2))
    control.update(9.0)
    assert control.applied == 0.2 and control.used
    again = EntropyCoefficient(EntropyConfig(coefficient=0.1))
    again.restore(control.state())
    assert again.applied == 0.1
    assert not EntropyCoefficient(EntropyConfig()).used
