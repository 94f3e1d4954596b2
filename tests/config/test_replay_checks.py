"""Router replay: errors for settings without effect or without a way to work, and the planned memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.cli.experts import check_experts
from skyrl_mega.cli.layout_checks import check_layouts
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import BuildConfig, Config, LayoutConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.routes import driver_bytes, rank_bytes


@pytest.mark.parametrize(
    "arguments",
    [
        "policy.moe.replay=rollout policy.recompute=full",
        "policy.moe.replay=policy data.mini_batch_prompts=16",
        "policy.moe.replay=rollout policy.options.recompute_granularity=selective rollout.options={block_size:16}",
    ],
)
def test_what_is_possible_passes(base: Path, arguments: str) -> None:
    check(compose(base, arguments.split()))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("policy.moe.replay=engine", "policy.moe.replay = engine: allowed is one of off, rollout, policy"),
        ("policy.moe.replay=policy", "policy.moe.replay = policy: with one mini-batch a step"),
        (
            "policy.moe.replay=policy data.mini_batch_prompts=16 algorithm.old_logprobs=engine",
            "policy.moe.replay = policy: with algorithm.old_logprobs=engine no pass",
        ),
        (
            "policy.moe.replay=rollout policy.options.moe_router_fusion=true",
            "policy.options.moe_router_fusion = true: a fused router chooses by itself",
        ),
        (
            "policy.moe.replay=rollout policy.options.recompute_granularity=selective "
            "policy.options.recompute_modules=[moe]",
            "policy.options.recompute_modules = [moe]: a MoE part",
        ),
        ("policy.moe.replay=rollout policy.recompute=moe", "policy.recompute = moe: a MoE part"),
        (
            "policy.moe.replay=rollout policy.fusions=[router] cluster.device=cuda cluster.nodes=2",
            "policy.fusions = [router]: a fused router chooses by itself, and policy.moe.replay=rollout",
        ),
        (
            "policy.moe.replay=rollout policy.options.moe_layer_recompute=true",
            "policy.options.moe_layer_recompute = true: a MoE part",
        ),
        (
            "policy.moe.replay=rollout rollout.options.data_parallel_size=2",
            "rollout.options.data_parallel_size = 2: its",
        ),
        (
            "policy.moe.replay=rollout rollout.options.enable_prefix_caching=false",
            "rollout.options.enable_prefix_caching = ",
        ),
        ("rollout.options.enable_return_routed_experts=true", "rollout.options.enable_return_routed_experts"),
    ],
)
def test_what_is_impossible_is_one_line(base: Path, arguments: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check(compose(base, arguments.split()))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_a_dense_model_has_no_routes() -> None:
    config = Config()
    config.policy.moe.replay, config.model.path = "rollout", "m"
    check_experts(config, hf_config(BuildConfig()))
    with pytest.raises(UserError, match=r"policy.moe.replay = rollout: m has no experts \(model_type qwen3\)"):
        check_experts(config, hf_config(BuildConfig(architecture="qwen3")))


def test_a_dense_model_sends_no_tokens_to_experts() -> None:
    """Checks a dense model with whole and cut matrices: the error is the same."""
    config = Config()
    config.policy.moe.dispatcher, config.model.path = "deepep", "m"
    check_experts(config, hf_config(BuildConfig()))
    for config.policy.layout.tensor in (1, 2):
        with pytest.raises(
            UserError, match=r"dispatcher = deepep: m has no experts .* policy.moe.dispatcher=alltoall$"
        ):
            check_experts(config, hf_config(BuildConfig(architecture="qwen3")))


def test_a_dispatcher_needs_experts_that_lie_apart() -> None:
    config, hf = Config(), hf_config(BuildConfig(max_length=4096))
    config.policy.ranks, config.policy.moe.dispatcher, config.cluster.device = 4, "deepep", "cuda"
    with pytest.raises(UserError, match=r"deepep: policy.layout.expert = 1 and expert_tensor = 1 put all experts on"):
        check_layouts(config, hf)
    config.policy.layout.expert = 2
    check_layouts(config, hf)
    config.policy.layout.expert, config.policy.layout.tensor = 1, 2
    check_layouts(config, hf)
    config.reference.layout, config.reference.ranks = LayoutConfig(), 2
    with pytest.raises(UserError, match=r"deepep: reference.layout.expert = 1 and .* reference.layout.exp"):
        check_layouts(config, hf)
    config.reference.layout.expert = 2
    check_layouts(config, hf)
    config.algorithm.advantage, config.critic.layout, config.critic.ranks = "gae", LayoutConfig(), 2
    with pytest.raises(UserError, match=r"deepep: critic.layout.expert = 1 and .*, or critic.layout.expert"):
        check_layouts(config, hf)
    config.critic.layout.expert = 2
    check_layouts(config, hf)


def test_a_dense_model_has_no_fusions_of_experts() -> None:
    config = Config()
    config.policy.fusions, config.model.path = ["rope", "permute", "router"], "m"
    check_experts(config, hf_config(BuildConfig()))
    with pytest.raises(UserError) as error:
        check_experts(config, hf_config(BuildConfig(architecture="qwen3")))
    assert str(error.value) == (
        "policy.fusions = [rope, permute, router]: m has no experts (model_type qwen3), so permute and router would do "
        "nothing; allowed there are rope and swiglu, or null for all that the model has"
    )
    config.policy.fusions = ["rope", "swiglu"]
    check_experts(config, hf_config(BuildConfig(architecture="qwen3")))


def test_memory_of_routes_is_planned() -> None:
    """Plans two MoE layers with two experts of eight: four bytes per token."""
    config, decoder = Config(), architecture(hf_config(BuildConfig())).describe(hf_config(BuildConfig()))
    assert rank_bytes(config, decoder, ParallelDims()) == driver_bytes(config, decoder) == 0
    config.policy.moe.replay = "policy"
    assert (rank_bytes(config, decoder, ParallelDims()), driver_bytes(config, decoder)) == (24, 0)
    config.policy.moe.replay = "rollout"
    assert driver_bytes(config, decoder) == 12
