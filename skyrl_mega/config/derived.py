"""What follows from the settings: defaults that depend on other keys."""

from __future__ import annotations

import math
from dataclasses import replace

from skyrl_mega.config.schema import (
    AlgorithmConfig,
    AsynchronyConfig,
    Config,
    LayoutConfig,
    PolicyConfig,
    RolloutConfig,
    SamplingConfig,
)

FILL = 2
"""An engine is given no more requests at once than would fill its KV cache so many times, were all of them as long as
they may become. vLLM takes in whatever fits at the moment; when running sequences then outgrow the cache, it drops some
and computes them once more. At 2 that happens only where most become longer than half of what they may, all of them at
the same time."""


AHEAD = 2
"""Trajectories of `skyrl_mega.evaluate` that are under way, as a multiple of the sequences that its engines run at
once: some are in their environments."""


def evaluated_at_once(config: Config, endpoint: bool) -> int:
    """Trajectories that `skyrl_mega.evaluate` has under way, on an endpoint or on engines of its own."""
    return config.rollout.concurrency * (1 if endpoint else AHEAD * config.rollout.engines)


def policy_ranks(config: Config) -> int:
    """Processes of the policy."""
    return config.policy.ranks or config.cluster.nodes * config.cluster.gpus_per_node


def reference_ranks(config: Config) -> int:
    """Processes of a reference with a layout of its own; 0 without one."""
    return (config.reference.ranks or policy_ranks(config)) if config.reference.layout else 0


def has_critic(config: Config) -> bool:
    """Whether advantages are estimated with a critic's values (`algorithms.advantages.GAE`)."""
    return config.algorithm.advantage == "gae"


def critic_ranks(config: Config) -> int:
    """Processes of the critic; 0 without one."""
    return (config.critic.ranks or policy_ranks(config)) if has_critic(config) else 0


def critic_layout(config: Config) -> LayoutConfig:
    """How a critic is cut."""
    return config.critic.layout or config.policy.layout


def critic_model(config: Config) -> PolicyConfig:
    """A critic's settings in the form of a policy's: its own, and the policy's for what it has none of."""
    critic = config.critic
    return replace(
        config.policy,
        ranks=critic_ranks(config),
        layout=critic_layout(config),
        optimizer=critic.optimizer,
        micro_tokens=critic.micro_tokens or config.policy.micro_tokens,
        moe=replace(config.policy.moe, replay="off"),  # it chooses experts of its own
    )


def micro_tokens(policy: PolicyConfig) -> int:
    """Token budget of a micro-batch, where it is given or `planner.micro_tokens` has decided it."""
    if policy.micro_tokens is None:
        raise ValueError("policy.micro_tokens has not been decided")
    return policy.micro_tokens


def planned_device(config: Config) -> str:
    """`cpu` or `cuda`, before anybody has looked: auto is planned as CUDA."""
    return "cpu" if config.cluster.device == "cpu" else "cuda"


def overlaps(policy: PolicyConfig, device: str) -> bool:
    """Whether a policy on this device (`cpu` or `cuda`) communicates while it computes."""
    return device == "cuda" if policy.overlap is None else policy.overlap


FUSIONS = ("rope", "permute", "router", "swiglu")
"""What `policy.fusions` may name."""
OF_EXPERTS = frozenset({"permute", "router"})
"""Those of them that a model without experts has no use for."""


def fused(policy: PolicyConfig, spec: str, experts: bool) -> frozenset[str]:
    """Which of `FUSIONS` run: `policy.fusions`, or all that compute the same here.

    A fused router chooses experts by itself: it can be told no route, and it has no tensor of scores that another
    loss could be computed from.

    Args:
        policy: The settings, which `config.speed_checks` has passed.
        spec: Whose layers they are, `te` or `local`; they are kernels of the former.
        experts: Whether the model has any.
    """
    if spec != "te":
        return frozenset()
    wanted = frozenset(FUSIONS if policy.fusions is None else policy.fusions)
    if not experts:
        return wanted - OF_EXPERTS
    if policy.fusions is None and (policy.moe.replay != "off" or policy.moe.aux_loss):
        return wanted - {"router"}
    return wanted


def logit_chunk(policy: PolicyConfig, device: str) -> int | None:
    """Tokens whose logits exist at once on this device (`cpu` or `cuda`); None with the fused head, where none do."""
    fused = device == "cuda" if policy.head == "auto" else policy.head == "fused"
    return None if fused else policy.logit_chunk


def gpus_needed(config: Config) -> int:
    """GPUs of policy, reference, critic and engines; shared ones count once."""
    apart = 0 if config.cluster.shared else config.rollout.engines * engine_ranks(config.rollout)
    return policy_ranks(config) + reference_ranks(config) + critic_ranks(config) + apart


def idle_gpus(config: Config) -> str | None:
    """What to say of GPUs that have nothing to do, for a run on CUDA; None where all have."""
    engines, policy = config.rollout.engines * engine_ranks(config.rollout), policy_ranks(config)
    total = config.cluster.nodes * config.cluster.gpus_per_node
    made = f"rollout.engines={config.rollout.engines} of {engine_ranks(config.rollout)} GPUs"
    if config.cluster.shared and engines < policy:
        return f"{made}: {policy - engines} of the policy's {policy} GPUs have no engine and generate nothing"
    if (needed := gpus_needed(config)) < total:
        trained = "policy, reference, critic" if has_critic(config) else "policy, reference"
        return f"{total - needed} of {total} GPUs are nobody's: {trained} and engines ({made}) take {needed}"
    return None


COMPARES = frozenset(
    {
        "grpo", "grpo_turns", "gdpo", "rloo", "opo", "pass_at_k", "maxrl", "gpg", "reinforce++_baseline",
        "optimal_token_baseline",
    }
)  # fmt: skip
"""Estimators that compare the samples of a prompt with one another."""


def compares_samples(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages compare the samples of a prompt with one another; a user's own estimator need not."""
    return algorithm.advantage in COMPARES


def generates_ahead(asynchrony: AsynchronyConfig) -> bool:
    """Whether tokens may be of weights that are older than those that train on them."""
    return asynchrony.mode != "off" and asynchrony.max_staleness > 0


ROUNDING = 1e-9
"""What a product of a setting and a count may be above the whole number that it stands for."""


def open_at_once(config: Config, evaluated: int = 0) -> int:
    """Trajectories that may be under way at once, each with its environment: those of a step, with
    `asynchrony.mode=full` of all steps that may be ahead; no more than `environment.slots`.

    Args:
        config: The settings.
        evaluated: Trajectories of an evaluation: beside these where they are generated ahead, else in their place.
    """
    dynamic, asynchrony = config.algorithm.dynamic_sampling, config.asynchrony
    prompts = math.ceil(config.data.prompts_per_step * (dynamic.oversample if dynamic.enabled else 1.0) - ROUNDING)
    steps = asynchrony.max_staleness + 1 if asynchrony.mode == "full" else 1
    trained = prompts * config.data.samples_per_prompt * min(steps, config.run.steps or steps)
    most = trained + evaluated if asynchrony.mode != "off" else max(trained, evaluated)
    return most if config.environment.slots is None else min(most, config.environment.slots)


def draws_greedy(algorithm: AlgorithmConfig) -> bool:
    """Whether a prompt's samples are compared with an answer to it at temperature 0."""
    return algorithm.advantage == "remax"


def cut_sampling(config: Config) -> str | None:
    """What to say of training samples that are drawn from a part of the policy's distribution; None of others."""
    sampling = config.rollout.sampling
    cuts = [f"top_p={sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top_k={sampling.top_k}"] * (sampling.top_k > 0)
    if not cuts or config.rollout.sampling.temperature == 0:
        return None
    capped = "" if config.algorithm.importance_cap is None else ", and algorithm.importance_cap corrects for it too"
    return (
        f"rollout.sampling.{', '.join(cuts)}: tokens are drawn from a part of the distribution and the policy is "
        f"trained over the whole of it: mismatch/* is not 0 with the best of engines{capped} (docs/recipes.md)"
    )


def expert_parallel(rollout: RolloutConfig) -> bool:
    """Whether engines deal whole experts to their workers."""
    return bool(rollout.options.get("enable_expert_parallel"))


def engine_data(rollout: RolloutConfig) -> int:
    """Data-parallel replicas inside one engine; its experts are dealt over all of them."""
    return int(rollout.options.get("data_parallel_size") or 1)


def engine_ranks(rollout: RolloutConfig) -> int:
    """Workers of one engine."""
    return rollout.tensor * engine_data(rollout)


def eager(rollout: RolloutConfig, device: str) -> bool:
    """Whether engines run without compilation and CUDA graphs. `auto` is planned as CUDA."""
    return device == "cpu" if rollout.eager is None else rollout.eager


ONLINE = "fp8_per_block"
"""vLLM's own quantisation of what a weight sync brings (`rollout.options.quantization`)."""
WIDE_CACHES = (None, "auto", "bfloat16", "float16")
"""Values of `rollout.options.kv_cache_dtype` that have more than a byte for an element; all others have at most one."""


def fp8_parameters(rollout: RolloutConfig) -> bool:
    """Whether engines have the parameters of an FP8 checkpoint: numbers, and a scale for every block of them."""
    overrides = rollout.options.get("hf_overrides")
    return isinstance(overrides, dict) and bool(overrides.get("quantization_config"))


def fp8_weights(rollout: RolloutConfig) -> bool:
    """Whether engines hold their linear layers in FP8: an FP8 checkpoint's, or what vLLM quantises as it arrives."""
    return fp8_parameters(rollout) or rollout.options.get("quantization") == ONLINE


def small_cache(rollout: RolloutConfig) -> bool:
    """Whether an element of the KV cache is one byte or less."""
    return rollout.options.get("kv_cache_dtype") not in WIDE_CACHES


SMALL_CACHES = (
    *("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head"),
    *("int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "ultraquant_4bit"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
"""vLLM's others (`CacheDType`)."""


def engine_precision(config: Config) -> str:
    """What engines compute in: `float32`, `bfloat16`, or `fp8` where weights or cache are."""
    fp8 = fp8_weights(config.rollout) or small_cache(config.rollout) or config.weights.wire.startswith("fp8")
    return "fp8" if fp8 else config.model.dtype


def response_limit(rollout: RolloutConfig) -> int:
    """Tokens after the prompt at most."""
    return rollout.max_response_tokens or rollout.max_turns * rollout.sampling.max_tokens


def length_limit(rollout: RolloutConfig) -> int:
    """Tokens of a whole sequence at most."""
    return rollout.max_length or rollout.max_prompt_tokens + response_limit(rollout)


def evaluation_sampling(config: Config) -> SamplingConfig:
    """How evaluation samples are drawn: as training samples, but for what `evaluation` sets."""
    sampling, own = config.rollout.sampling, config.evaluation
    return replace(
        sampling,
        temperature=sampling.temperature if own.temperature is None else own.temperature,
        top_p=sampling.top_p if own.top_p is None else own.top_p,
        max_tokens=own.max_tokens or sampling.max_tokens,
    )
