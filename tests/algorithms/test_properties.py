"""Invariants under any settings: no NaN, and no gradient from a group without a signal."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.advantages import ADVANTAGES
from skyrl_mega.algorithms.losses import LOSSES, Figures, LossInputs
from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.batch.mini_batch_stats import mean_importance_weight, token_selections
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.schema import (
    AlgorithmConfig,
    Config,
    KlConfig,
    MoeConfig,
    OverlongConfig,
    RejectionConfig,
    RolloutConfig,
)
from skyrl_mega.config.schema.entropy import EntropyConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.megatron.objectives import objective
from skyrl_mega.megatron.packing import pack
from skyrl_mega.trainer.kl_reward import KlReward
from skyrl_mega.trajectories.sequences import Sequences
from skyrl_mega.trajectories.trajectory import GREEDY, Group, Status, Trajectory
from tests.support.batches import make_batch, mini_batches, teaches, token_advantages

REWARDS = st.sampled_from([-1.0, 0.0, 0.1, 1.0, 1e6])
STATUS = st.sampled_from([Status.COMPLETED] * 4 + [Status.TRUNCATED_TOKENS, Status.TRUNCATED_TURNS, Status.ERROR_ENV])
TRAJECTORIES = st.lists(st.tuples(REWARDS, st.integers(0, 6), STATUS), min_size=2, max_size=4)
GROUPS = st.lists(TRAJECTORIES, min_size=1, max_size=4)
REJECTION = st.builds(
    RejectionConfig,
    level=st.sampled_from(["off", "token", "sequence", "geometric"]),
    low=st.floats(0, 1),
    high=st.floats(1, 9),
    outlier_low=st.one_of(st.none(), st.floats(0, 1)),
    outlier_high=st.one_of(st.none(), st.floats(1, 9)),
    off_policy=st.one_of(st.none(), st.floats(0, 2)),
)
IMPORTANCE = st.fixed_dictionaries(
    {
        "importance_cap": st.floats(0, 5),
        "importance_normalize": st.booleans(),
        "importance_floor": st.floats(0, 1),
        "importance_outside": st.sampled_from(["truncate", "mask"]),
        "importance_level": st.sampled_from(["token", "sequence"]),
    }
)
CORRECTION = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"rejection": REJECTION}),
    st.tuples(IMPORTANCE, REJECTION).map(lambda both: {**both[0], "rejection": both[1]}),
    st.just({"old_logprobs": "engine"}),
)


def repaired(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Returns the settings adjusted to avoid the errors of most random settings."""
    if "dual_clip" not in algorithm.loss_traits.reads:
        algorithm.dual_clip = None
    algorithm.kl.unbiased &= bool(algorithm.kl.coefficient) and algorithm.kl.estimator in ("k1", "k3")
    if algorithm.importance_cap is not None:
        algorithm.importance_floor = min(algorithm.importance_floor, algorithm.importance_cap / 2)
    algorithm.overlong.filter |= algorithm.overlong.filter_by == "tokens"
    algorithm.loss_mean_length = (algorithm.loss_mean_length or 7) if algorithm.loss_mean == "constant" else None
    algorithm.normalize |= not algorithm.advantage_traits.normalizes
    if algorithm.rejection.level == "off":
        algorithm.rejection.low, algorithm.rejection.high = RejectionConfig().low, RejectionConfig().high
    return algorithm


ALGORITHMS = st.builds(
    lambda correction, **others: AlgorithmConfig(**correction, **others),
    correction=CORRECTION,
    advantage=st.sampled_from(list(ADVANTAGES)),
    normalize=st.booleans(),
    gamma=st.sampled_from([1.0, 1.0, 0.9, 0.0]),
    whiten=st.sampled_from(["none", "none", "group", "batch", "batch_std"]),
    loss=st.sampled_from(list(LOSSES)),
    clip_low=st.floats(0, 1),
    clip_high=st.floats(0, 5),
    dual_clip=st.one_of(st.none(), st.floats(1, 20)),
    loss_mean=st.sampled_from(["tokens", "sequences", "prompts", "constant", "micro_batches"]),
    loss_mean_samples=st.integers(1, 5),
    loss_mean_length=st.one_of(st.none(), st.integers(1, 50)),
    kl=st.builds(
        KlConfig,
        coefficient=st.sampled_from([0.0, 0.1]),
        estimator=st.sampled_from(["k1", "k2", "k3", "abs", "k3+"]),
        mean=st.sampled_from(["loss", "tokens", "sequences"]),
        unbiased=st.booleans(),
        where=st.sampled_from(["loss", "loss", "reward"]),
    ),
    entropy=st.builds(
        EntropyConfig,
        coefficient=st.sampled_from([0.0, 0.1]),
        target=st.one_of(st.none(), st.floats(0, 1)),
        top_share=st.floats(0, 1),
    ),
    overlong=st.builds(OverlongConfig, filter=st.booleans(), filter_by=st.sampled_from(["budgets", "tokens"])),
).map(repaired)


def passes(algorithm: AlgorithmConfig) -> bool:
    """Returns True if the checks before a start accept these settings."""
    config = Config(algorithm=algorithm)
    config.data.epochs_per_step = 2
    config.model.path, config.data.train, config.policy.ranks = "m", ["d"], 7
    try:
        check(config, planned=True)
    except UserError as error:
        return not str(error).startswith("algorithm.")
    return True


def group_of(number: int, played: list[tuple[float, int, Status]], g: torch.Generator) -> Group:
    prompt = Prompt(number, [], "mine", {})
    trajectories = []
    for i, (reward, response, status) in enumerate(played):
        logprobs = (-5 * torch.rand(response, generator=g)).tolist()
        tokens = array("i", range(2 + response))
        mask, logprob_array = array("b", [0, 0] + [1] * response), array("f", [0.0, 0.0, *logprobs])
        trajectories.append(
            Trajectory(prompt, i, tokens, mask, logprob_array, 2, 0.0 if status.failed else reward, status, 1)
        )
    ended = [Status.COMPLETED, Status.TRUNCATED_TOKENS, Status.ERROR_ENV][int(torch.randint(3, (1,), generator=g))]
    reward = float(torch.randint(2, (1,), generator=g))
    greedy = Trajectory(prompt, GREEDY, array("i", [0]), array("b", [0]), array("f", [0.0]), 1, reward, ended, 1)
    return Group(prompt, trajectories, greedy)


def add_distributions(batch: Batch, g: torch.Generator) -> None:
    """Adds the sampling distribution of each token: certain, nearly uniform, or anything between."""
    spread = torch.tensor([0.1, 1.0, 1e3])[torch.randint(3, (len(batch.tokens.tokens), 1), generator=g)]
    probs = (spread * torch.randn(len(batch.tokens.tokens), 3, generator=g)).softmax(-1)
    batch.tokens["old_logprobs"], batch.tokens["old_squares"] = (
        probs[:, 0].log().clamp(min=-1e3),
        probs.square().sum(-1),
    )


def loss_and_gradient(mini: Sequences, algorithm: AlgorithmConfig, g: torch.Generator) -> tuple[Any, Any, Any]:
    """Returns loss and gradient for unrelated log-probs, some far apart."""
    mini["old_logprobs"] = -3 * torch.rand(len(mini.tokens), generator=g)
    mini["old_entropy"] = torch.rand(len(mini.tokens), generator=g)
    for name, parts in token_selections([mini], algorithm, [0]).items():
        mini[name] = parts[0]
    packed = pack(mini, context=1, context_rank=0, tensor=1)
    columns, length = packed.columns, len(packed.targets)

    def some() -> torch.Tensor:
        return -torch.rand(length, generator=g) * torch.where(torch.rand(length, generator=g) < 0.1, 1e4, 3.0)

    logprobs = some().requires_grad_()
    inputs = LossInputs(
        logprobs_L=logprobs,
        weights_L=columns["weights"],
        old_L=columns["old_logprobs"],
        advantages_L=columns["advantages"],
        rollout_L=columns["rollout_logprobs"],
        reference_L=some() if algorithm.kl.coefficient else None,
        entropy_L=some().abs(),
        high_covariance_L=columns.get("high_covariance"),
        high_entropy_L=columns.get("high_entropy"),
        kl_weights_L=columns.get("kl_weights"),
        sequence_L=packed.answer,
        sequences=packed.answers,
    )
    figures = Figures(importance_mean=mean_importance_weight(mini, algorithm))
    loss, metrics = objective(algorithm.loss, algorithm, figures)(inputs)
    loss.backward()
    return loss, logprobs.grad, metrics


@given(algorithm=ALGORITHMS, played=GROUPS, seed=st.integers(0, 999))
def test_settings_that_pass_the_checks_never_give_nan(
    algorithm: AlgorithmConfig, played: list[list[tuple[float, int, Status]]], seed: int
) -> None:
    assume(passes(algorithm))
    g = torch.Generator().manual_seed(seed)
    groups = [group_of(number, trajectories, g) for number, trajectories in enumerate(played)]
    assume(algorithm.advantage != "maxrl" or all(t.reward >= 0 for group in groups for t in group.trajectories))
    batch = make_batch(groups, algorithm, RolloutConfig())
    if algorithm.kl.where == "reward":
        for name in ("old_logprobs", "reference_logprobs"):
            batch.tokens[name] = -1e3 * torch.rand(len(batch.tokens.tokens), generator=g)
        KlReward(algorithm.kl).penalize(batch)
    add_distributions(batch, g)
    batch.tokens["values"] = torch.randn(len(batch.tokens.tokens), generator=g)  # a critic's values
    batch.tokens["advantages"] = token_advantages(batch, algorithm)
    assert batch.tokens["advantages"].isfinite().all()
    for mini in mini_batches(batch, 2, algorithm):
        loss, gradient, metrics = loss_and_gradient(mini, algorithm, g)
        assert loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite().all() for value in metrics.values())


@given(algorithm=ALGORITHMS, played=GROUPS, seed=st.integers(0, 999), reward=REWARDS)
@settings(suppress_health_check=list(HealthCheck))  # four of five random settings have a signal in every group
def test_a_group_without_a_signal_has_no_gradient(
    algorithm: AlgorithmConfig, played: list[list[tuple[float, int, Status]]], seed: int, reward: float
) -> None:
    """Gives all trajectories of the first group the same reward and expects no gradient.

    Excluded are settings with a signal even then: whitening over a step, rewards of turns, a critic, a greedy answer.
    """
    algorithm.kl.coefficient, algorithm.entropy = 0.0, EntropyConfig()
    assume(passes(algorithm) and not algorithm.advantage.startswith(("reinforce", "gae", "remax")))
    assume(algorithm.whiten != "batch")
    assume(not algorithm.loss_traits.learns_without_advantage)
    g = torch.Generator().manual_seed(seed)
    played[0] = [(reward, response, status) for _, response, status in played[0]]
    groups = [group_of(number, trajectories, g) for number, trajectories in enumerate(played)]
    assume(algorithm.advantage != "maxrl" or all(t.reward >= 0 for group in groups for t in group.trajectories))
    batch = make_batch(groups, algorithm, RolloutConfig())
    add_distributions(batch, g)
    batch.tokens["advantages"] = token_advantages(batch, algorithm)
    first, *_ = mini_batches(batch, 1, algorithm)
    assert not teaches(batch, algorithm, MoeConfig(), 1)[0]
    _, gradient, _ = loss_and_gradient(first, algorithm, g)
    assert not gradient.any()
