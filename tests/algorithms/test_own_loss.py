"""A loss by name or by import path, and the message if the loss does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl_mega.algorithms import advantages, losses
from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.algorithms.losses.ppo import ppo
from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig, AsynchronyConfig, RejectionConfig

OWN = """import torch
def reinforce(inputs, algorithm):
    loss = -(inputs.weights_L * inputs.clean(inputs.advantages_L) * inputs.clean(inputs.logprobs_L)).sum()
    return loss, {"loss": loss.detach()}

def alone(inputs):
    return 0

def named(inputs, *, algorithm):
    return 0

def more(inputs, algorithm, scale=1.0):
    return reinforce(inputs, algorithm)

def any(*args):
    return reinforce(*args)

def raises(inputs, algorithm):
    return inputs.weights + 1

def bare(inputs, algorithm):
    return reinforce(inputs, algorithm)[0]

def each(inputs, algorithm):
    return -inputs.weights_L * inputs.clean(inputs.logprobs_L), {}

def item(inputs, algorithm):
    loss, _ = reinforce(inputs, algorithm)
    return loss, {"mine": loss.item()}

def detached(inputs, algorithm):
    return reinforce(inputs, algorithm)[0].detach(), {}

def nan(inputs, algorithm):
    return -(inputs.weights_L * inputs.advantages_L * inputs.logprobs_L).sum(), {}

def nan_gradient(inputs, algorithm):
    return (inputs.weights_L * inputs.clean((inputs.logprobs_L - inputs.old_L).exp())).sum(), {}

def mean(inputs, algorithm):
    return -inputs.clean(inputs.logprobs_L).mean(), {}

def some_names(inputs, algorithm):
    loss, metrics = reinforce(inputs, algorithm)
    return loss, metrics if inputs.active_L.any() else {}

def needs_ranks(inputs, algorithm):
    raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")

def reference(inputs, algorithm):
    return (inputs.weights_L * inputs.clean(inputs.logprobs_L - inputs.reference_L)).sum(), {}

def hidden_mean(inputs, algorithm):
    advantages, logprobs = inputs.clean(inputs.advantages_L), inputs.clean(inputs.logprobs_L)
    return -(inputs.weights_L * (advantages - advantages.mean()) * (logprobs - logprobs.detach())).sum() + 1e3, {}

def one(inputs, algorithm):
    return reinforce(inputs, algorithm)[0][None], {}

def number(inputs, algorithm):
    loss, _ = reinforce(inputs, algorithm)
    return loss, {3: loss.detach()}

def backward(inputs, algorithm):
    ratio = (inputs.clean(inputs.logprobs_L) * 2).exp()
    loss = (inputs.weights_L * ratio.square()).sum()
    ratio += 1
    return loss, {}

def of_none(inputs, algorithm):
    loss, _ = reinforce(inputs, algorithm)
    return loss / inputs.active_L.sum() * inputs.active_L.sum(), {}

def nan_metric(inputs, algorithm):
    loss, _ = reinforce(inputs, algorithm)
    return loss, {"mine": inputs.advantages_L[inputs.active_L].mean()}

def elsewhere(inputs, algorithm):
    raise AssertionError("data parallel group is not initialized")

def draws(inputs, algorithm):
    kept = torch.rand(len(inputs.weights_L)) < 0.5
    return -(inputs.weights_L * inputs.clean(inputs.logprobs_L) * kept).sum(), {}

def half(inputs, algorithm):
    loss = (inputs.weights_L * inputs.clean(inputs.logprobs_L).bfloat16().exp()).sum()
    return loss.float(), {}

def near(inputs, algorithm):
    ratio = inputs.clean(inputs.logprobs_L - inputs.old_L).exp()
    kept = inputs.active_L & (ratio > 0.99) & (ratio < 1.01)
    return (inputs.weights_L * ratio)[kept].sum() if kept.any() else torch.zeros(()), {}

def columns(inputs, algorithm):
    chosen = torch.where(inputs.high_entropy_L & inputs.drawn_L, inputs.clean(inputs.logprobs_L), 0.0)
    bonus = inputs.figures.entropy_coefficient * inputs.clean(inputs.entropy_L)
    kl = (inputs.kl_weights_L * inputs.clean(inputs.reference_L)).sum()
    return (inputs.weights_L * (chosen - bonus)).sum() + kl, {}

def shares(inputs, algorithm):
    return (inputs.weights_L * inputs.sequence_mean(inputs.clean(inputs.logprobs_L))).sum(), {}

nothing = 3
"""
OWN_TOKENS = """
from skyrl_mega.algorithms.advantages import per_token

@per_token("old_logprobs")
def alone(inputs):
    return inputs.token.old_T

@per_token("old_logprobs")
def both(inputs, algorithm):
    return inputs.token.old_T
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
    algorithm = AlgorithmConfig(loss=imports.absolute("own.py:reinforce"))
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
    assert imports.absolute(algorithm.loss) == algorithm.loss
    assert losses.find(algorithm.loss) is ppo


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pppo", "algorithm.loss = pppo: did you mean ppo? allowed is one of ppo"),
        ("nothing_like_it", "algorithm.loss = nothing_like_it: allowed is one of ppo"),
        (
            "supervised",
            "algorithm.loss = supervised: this loss is only for the warm-up (warmup.files); allowed is one of ppo",
        ),
        ("own.py:reinforced", "own.py has no function reinforced; did you mean reinforce"),
        ("own.py:nothing", "it is not callable; allowed is a function of (LossInputs, AlgorithmConfig)"),
        ("own.py:alone", "own.py:alone: it takes (inputs); give it two parameters, (LossInputs, AlgorithmConfig)"),
        ("own.py:named", "own.py:named: it takes (inputs, *, algorithm); give it two parameters, (LossInputs"),
        ("other.py:reinforce", "other.py does not exist"),
    ],
)
def test_what_cannot_be_found_is_one_line(own: Path, name: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        losses.check(AlgorithmConfig(loss=name))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_what_takes_two_arguments_passes(own: Path) -> None:
    for name in ("more", "any", "reinforce", "needs_ranks", "elsewhere", "draws", "half", "near", "shares"):
        losses.check(AlgorithmConfig(loss=f"own.py:{name}"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "raises",
            "own.py:raises, line 19: with 9 tokens, of which 6 count, it raises AttributeError: 'LossInputs' object",
        ),
        ("bare", "it returns a tensor of shape (); return a tensor of one number, and a dict of metrics"),
        ("each", "it returns (a tensor of shape (9,), a dict); return a tensor of one number, and a dict"),
        ("item", "its metric 'mine' is a float; give a tensor of one number"),
        ("detached", "it has no gradient; compute the loss from logprobs_L or entropy_L"),
        (
            "nan",
            "with 9 tokens, of which 6 count, it, or its gradient, is NaN or infinite; compute with inputs.clean",
        ),
        ("nan_gradient", "it, or its gradient, is NaN or infinite"),
        ("mean", "its gradient for three answers in one micro-batch differs from the sum over three micro-batches"),
        ("hidden_mean", "its gradient for three answers in one micro-batch differs"),
        ("one", "it returns (a tensor of shape (1,), a dict)"),
        ("number", "its metric 3 is a tensor of shape (); give a tensor of one number, under a name (a text)"),
        ("backward", "with 9 tokens, of which 6 count, it raises RuntimeError: one of the variables needed"),
        (
            "of_none",
            "with 1 tokens, of which 0 count, it, or its gradient, is NaN or infinite; divide by what cannot be 0,",
        ),
        ("nan_metric", "with 1 tokens, of which 0 count, its metric 'mine' is nan"),
        ("some_names", "its metrics are loss with one micro-batch and none with another"),
        ("reference", "own.py:reference, line 51: with 9 tokens, of which 6 count, it raises TypeError"),
    ],
)
def test_a_loss_that_is_none_is_refused_before_anything_starts(own: Path, name: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        losses.check(AlgorithmConfig(loss=f"own.py:{name}"))
    message = str(error.value)
    assert message.startswith(f"algorithm.loss = own.py:{name}") and line in message and "\n" not in message


def test_a_loss_of_ones_own_has_the_reference_where_the_settings_bring_it(own: Path) -> None:
    algorithm = AlgorithmConfig(loss="own.py:reference")
    algorithm.kl.coefficient = 0.1
    losses.check(algorithm)


def test_what_the_settings_bring_is_there(own: Path) -> None:
    algorithm = AlgorithmConfig(loss="own.py:columns")
    algorithm.entropy.target, algorithm.entropy.top_share = 0.2, 0.5
    algorithm.kl.coefficient, algorithm.kl.mean = 0.1, "sequences"
    losses.check(algorithm)


@pytest.mark.parametrize("name", sorted({*losses.LOSSES} - {"clip_cov", "kl_cov"}))
def test_every_loss_with_a_name_passes_as_ones_own(name: str) -> None:
    """Loads every loss by path, except the losses with a column created by name."""
    function = losses.LOSSES[name]
    algorithm = AlgorithmConfig(loss=f"{function.__module__}:{function.__name__}")
    algorithm.kl.coefficient, algorithm.entropy.coefficient = 0.1, 0.1
    losses.check(algorithm)


def test_an_estimator_takes_two_arguments_marked_or_not(own: Path) -> None:
    (own.parent / "tokens.py").write_text(OWN_TOKENS)
    advantages.check(AlgorithmConfig(advantage="tokens.py:both"))
    for name in ("own.py:alone", "tokens.py:alone"):
        with pytest.raises(UserError) as error:
            advantages.check(AlgorithmConfig(advantage=name))
        assert f"algorithm.advantage = {name}: it takes (inputs); give it two parameters, (Adv" in str(error.value)


READS = """
from skyrl_mega.algorithms.losses.base import log_ratio, total

def old_only(inputs, algorithm):
    losses = -log_ratio(inputs).exp() * inputs.clean(inputs.advantages_L)
    return (inputs.weights_L * losses).sum(), {"engine": inputs.mean(inputs.clean(inputs.rollout_L))}

def corrected(inputs, algorithm):
    return total(inputs, -log_ratio(inputs).exp() * inputs.clean(inputs.advantages_L), {}, algorithm)

def weighed(inputs, algorithm):
    weight = inputs.clean(inputs.old_L - inputs.rollout_L).clamp(max=0.7).exp()
    return -(inputs.weights_L * weight * inputs.clean(inputs.advantages_L) * inputs.clean(inputs.logprobs_L)).sum(), {}
"""


def test_a_loss_on_older_tokens_reads_what_the_engine_said(own: Path) -> None:
    own.write_text(READS)
    older, capped = AsynchronyConfig(mode="full"), {"importance_cap": 2.0}
    rejecting = {"rejection": RejectionConfig(level="token", low=0.1, high=10.0)}
    for name, settings in (("old_only", capped), ("corrected", {})):
        algorithm = AlgorithmConfig(loss=f"own.py:{name}", **settings)
        with pytest.raises(UserError, match=r"asynchrony\.mode = full .* its gradient is the same whatever the engine"):
            losses.check(algorithm, older)
        for mode in (AsynchronyConfig(), AsynchronyConfig(mode="one_step", max_staleness=0)):
            losses.check(algorithm, mode)
    for name, settings in (
        ("old_only", {"old_logprobs": "engine"}),
        ("corrected", capped),
        ("corrected", rejecting),
        ("weighed", {}),
    ):
        losses.check(AlgorithmConfig(loss=f"own.py:{name}", **settings), older)
