"""Errors and notes for unused settings; the tables of readers are compared with real reads."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_mega.algorithms.advantages import ADVANTAGES, PerToken
from skyrl_mega.algorithms.losses import LOSSES, LossInputs
from skyrl_mega.batch.mini_batch_stats import token_selections
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.checks.unused import unused_notes
from skyrl_mega.config.compose import compose
from skyrl_mega.config.megatron_options import check as check_options
from skyrl_mega.config.megatron_options import unplanned_memory_notes
from skyrl_mega.config.schema import AlgorithmConfig, Config, PolicyConfig
from skyrl_mega.config.schema.estimators import ESTIMATORS
from skyrl_mega.config.schema.losses import LOSSES as TRAITS

CONFIGS = Path(__file__).parents[2] / "configs"
OF_LOSSES = {name for traits in TRAITS.values() for name in traits.reads}


class Watched:
    """Settings that record every read."""

    def __init__(self, settings: Any, read: set[str], prefix: str = "") -> None:
        self._of = settings, read, prefix

    def __getattr__(self, name: str) -> Any:
        settings, read, prefix = self._of
        value = getattr(settings, name)
        read.add(prefix + name)
        return Watched(value, read, f"{prefix}{name}.") if is_dataclass(value) else value


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_reads_what_the_table_says(loss: str) -> None:
    columns = {name: torch.linspace(-2.0, -1.0, 6) for name in ("advantages", "old_logprobs")}
    weights = torch.full((6,), 1 / 6)
    read: set[str] = set()
    watched: Any = Watched(AlgorithmConfig(loss=loss), read)
    mini: Any = {**columns, "weights": weights}
    treated = token_selections([mini], watched, [0]).get("high_covariance", [None])[0]
    inputs = LossInputs(
        logprobs_L=torch.linspace(-2.0, -0.5, 6),
        weights_L=weights,
        old_L=columns["old_logprobs"],
        advantages_L=torch.linspace(-1.0, 1.0, 6),
        sequence_L=torch.zeros(6, dtype=torch.int64),
        sequences=1,
        high_covariance_L=treated,
    )
    LOSSES[loss](inputs, watched)
    assert read & OF_LOSSES == set(TRAITS[loss].reads)


def test_estimators_read_what_the_table_says() -> None:
    def reads(estimator: Any, *names: str) -> bool:
        function = estimator.estimate if isinstance(estimator, PerToken) else estimator
        return bool({*names} & {*function.__code__.co_names})

    for name, traits in ESTIMATORS.items():
        estimator = ADVANTAGES[name]
        assert traits.normalizes == reads(estimator, "normalize"), name
        assert traits.discounts == reads(estimator, "gamma"), name
        assert traits.greedy == reads(estimator, "greedy_N"), name
        assert traits.critic == ("values" in getattr(estimator, "needs", ())), name
        grouped = reads(estimator, "group", "count", "centred", "sums", "groups_N")
        assert bool(traits.compares) == grouped, name


def composed(*settings: str) -> Config:
    """Returns the smallest passing configuration with these settings on top."""
    least = ["model.path=m", "data.train=[t.parquet]", "cluster.device=cpu", "policy.ranks=1"]
    return compose(None, [*least, *settings])


REFUSED = [
    (
        "algorithm.rejection.low=0.9",
        "algorithm.rejection.low = 0.9: it has no effect with algorithm.rejection.level=off",
    ),
    ("algorithm.rejection.high=5", "give algorithm.rejection.level=token, sequence or geometric, or algorithm.rej"),
    (
        "algorithm.kl.horizon=9",
        "algorithm.kl.horizon = 9: the coefficient has no target to adapt to; give algorithm.kl",
    ),
    ("algorithm.entropy.step=0.1", "algorithm.entropy.step = 0.1: the coefficient has no target to adapt to"),
    ("algorithm.entropy.least=0.1", "give algorithm.entropy.target, or algorithm.entropy.least=0.0"),
    ("algorithm.entropy.most=0.5", "algorithm.entropy.most = 0.5: "),
    ("algorithm.overlong.penalty=2", "algorithm.overlong.penalty = 2.0: algorithm.overlong.buffer=0 has no tokens"),
    (
        "algorithm.dynamic_sampling.enabled=true algorithm.dynamic_sampling.replace_from=0.5",
        "algorithm.dynamic_sampling.mode=filter makes no copies; give algorithm.dynamic_sampling.mode=replace, or",
    ),
    (
        "algorithm.dynamic_sampling.replace_from=0.5",
        "give algorithm.dynamic_sampling.enabled=true and algorithm.dynamic_sampling.mode=replace, or",
    ),
]


@pytest.mark.parametrize(("settings", "line"), REFUSED)
def test_what_nothing_reads_is_refused(settings: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check(composed(*settings.split()))
    assert line in str(error.value) and "\n" not in str(error.value)
    check(composed(*settings.split(), "algorithm.advantage=own.py:advantage"))


@pytest.mark.parametrize(
    "settings",
    [
        "algorithm.rejection.level=token algorithm.rejection.high=5",
        "algorithm.loss_mean=constant algorithm.loss_mean_length=100",
        "algorithm.kl.where=reward algorithm.kl.coefficient=0.1 algorithm.kl.target=6 algorithm.kl.horizon=9",
        "algorithm.entropy.target=0.2 algorithm.entropy.step=0.1 algorithm.entropy.most=0.5",
        "algorithm.overlong.buffer=10 algorithm.overlong.penalty=2",
        "algorithm.normalize=false algorithm.advantage=grpo_turns",
        "algorithm.dynamic_sampling.enabled=true algorithm.dynamic_sampling.mode=replace "
        "algorithm.dynamic_sampling.replace_from=0.5",
        "algorithm.overlong.penalty=1 algorithm.rejection.low=0.5",
        "algorithm.sequence_unit=trajectory algorithm.loss=gspo",
        "algorithm.sequence_unit=trajectory algorithm.rejection.outlier_low=0.001",
        "algorithm.kl.coefficient=0.1 algorithm.kl.mean=sequences algorithm.loss=cispo algorithm.cispo.clip_high=3",
    ],
)
def test_what_is_read_passes(settings: str) -> None:
    config = composed(*settings.split())
    check(config)
    assert unused_notes(config) == []


TOLD = [
    (
        "algorithm.loss=cispo algorithm.clip_high=4",
        "algorithm.clip_high = 4.0: algorithm.loss=cispo reads algorithm.cispo.clip_low and algorithm.cispo.clip_high, "
        "and ignores this; give algorithm.loss=ppo, or algorithm.clip_high=0.2",
    ),
    (
        "algorithm.loss=kl_cov algorithm.clip_low=0.1",
        "algorithm.clip_low = 0.1: algorithm.loss=kl_cov reads ",
    ),
    ("algorithm.gspo.clip_low=0.1", "algorithm.gspo.clip_low = 0.1: algorithm.loss=ppo reads algorithm.clip_low"),
    ("algorithm.loss=dppo_kl algorithm.dppo.tv_low=0.1", "algorithm.loss=dppo_kl reads algorithm.dppo.kl_low"),
    ("algorithm.loss_mean_samples=4", "algorithm.loss_mean_samples = 4: algorithm.loss_mean=tokens has no groups"),
    (
        "algorithm.loss_mean_length=100",
        "algorithm.loss_mean_length = 100: algorithm.loss_mean=tokens divides by no length; give "
        "algorithm.loss_mean=constant, or algorithm.loss_mean_length=null",
    ),
    (
        "algorithm.normalize=false algorithm.advantage=rloo",
        "algorithm.normalize = false: algorithm.advantage=rloo divides by no standard deviation",
    ),
    ("algorithm.kl.mean=sequences", "algorithm.kl.mean = sequences: algorithm.kl.coefficient=0 has no KL term"),
    (
        "algorithm.sequence_unit=trajectory",
        "algorithm.sequence_unit = trajectory: neither algorithm.loss nor a correction has one ratio for all tokens",
    ),
]


@pytest.mark.parametrize(("settings", "line"), TOLD)
def test_what_a_recipe_may_have_is_told(settings: str, line: str) -> None:
    config = composed(*settings.split())
    (note,) = unused_notes(config)
    assert line in note
    assert unused_notes(composed(*settings.split(), "algorithm.advantage=own.py:advantage")) == []


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_goes_with_every_loss_and_mean(file: Path) -> None:
    config = compose(file, ["algorithm.dual_clip=null", "data.epochs_per_step=2", "algorithm.kl.coefficient=0"])
    for loss in LOSSES:
        for mean in ("tokens", "sequences", "prompts"):
            config.algorithm.loss, config.algorithm.loss_mean = loss, mean
            check(config, planned=True)


def test_what_megatrons_own_names_recompute_is_told_as_not_planned() -> None:
    def given(**options: object) -> PolicyConfig:
        return PolicyConfig(options=options)

    assert unplanned_memory_notes(given(moe_router_dtype="fp32")) == []
    for name in ("activation_func_fp8_input_store", "moe_layer_recompute"):
        (note,) = unplanned_memory_notes(given(**{name: True}))
        assert note.startswith(f"policy.options.{name} = true: the dry run plans ")
        assert unplanned_memory_notes(given(**{name: False})) == []
    (note,) = unplanned_memory_notes(given(recompute_granularity="selective", recompute_modules=["core_attn"]))
    assert note.startswith("policy.options.recompute_granularity = selective: the dry run plans policy.recompute=none")
    whole_layers = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for allowed in ({"recompute_method": "block", "recompute_num_layers": 2}, {"recompute_num_layers": 4}):
        check_options(Config(policy=given(**{**whole_layers, **allowed})))
    with pytest.raises(UserError, match=r"give policy\.recompute=full"):
        check_options(Config(policy=given(**whole_layers, recompute_num_layers=1)))


def test_an_evaluation_without_prompts() -> None:
    (note,) = unused_notes(composed("data.eval=[]", "evaluation.every=5", "evaluation.samples=4"))
    assert note.startswith("evaluation.every=5, evaluation.samples=4: data.eval=[] has no prompts")
    for settings in (["data.eval=[]"], ["data.eval=[]", "evaluation.every=0"], ["data.eval=[a]", "evaluation.every=5"]):
        assert unused_notes(composed(*settings)) == []
