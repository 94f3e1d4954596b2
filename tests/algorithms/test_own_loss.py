"""A loss by name or by import path, and what is said of one that cannot be found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_mega.algorithms import losses
from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.algorithms.losses.ppo import ppo
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig

OWN = """
def reinforce(inputs, algorithm):
    loss = -(inputs.weights_L * inputs.clean(inputs.advantages_L) * inputs.clean(inputs.logprobs_L)).sum()
    return loss, {"loss": loss.detach()}

nothing = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_by_name() -> None:
    assert losses.find("ppo") is ppo
    losses.check(AlgorithmConfig())


def test_by_the_path_of_a_file(own: Path) -> None:
    algorithm = losses.with_absolute_path(AlgorithmConfig(loss="own.py:reinforce"))
    assert algorithm.loss == f"{own}:reinforce"
    losses.check(algorithm)
    nan = torch.full((2,), torch.nan)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        logprobs_L=logprobs, weights_L=torch.tensor([0.5, 0.0]), old_L=nan, advantages_L=torch.tensor([2.0, torch.nan])
    )
    loss, metrics = losses.find(algorithm.loss)(inputs, algorithm)
    loss.backward()
    assert loss.item() == metrics["loss"].item() == 1.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0]


def test_a_module_stays_a_module() -> None:
    algorithm = AlgorithmConfig(loss="skyrl_mega.algorithms.losses.ppo:ppo")
    assert losses.with_absolute_path(algorithm) == algorithm
    assert losses.find(algorithm.loss) is ppo


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pppo", "algorithm.loss = pppo: allowed is one of ppo"),
        ("supervised", "algorithm.loss = supervised: the warm-up has it; allowed is one of ppo"),
        ("own.py:reinforced", "own.py has no function reinforced; did you mean reinforce"),
        ("own.py:nothing", "it is not a function of (LossInputs, AlgorithmConfig)"),
        ("other.py:reinforce", "other.py does not exist"),
    ],
)
def test_what_cannot_be_found_is_one_line(own: Path, name: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        losses.check(AlgorithmConfig(loss=name))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
