"""Values derived from several settings, such as defaults of dependent keys."""

from __future__ import annotations

import math
from dataclasses import replace
from urllib.parse import urlsplit

from skyrl_mega.config.containers import environment_slots
from skyrl_mega.config.schema import (
    AsynchronyConfig,
    Config,
    EnvironmentConfig,
    LayoutConfig,
    PolicyConfig,
    RolloutConfig,
    SamplingConfig,
)

CACHE_FILL = 2
"""Limit of an engine's outstanding requests, as a multiple of the requests needed to fill the KV cache at maximum
length. vLLM admits any sequence with enough space at the moment; when running sequences outgrow the cache, vLLM
preempts and recomputes some sequences. With 2, preemption needs most sequences to exceed half of the maximum length at
the same time."""


AHEAD = 2
"""Concurrent trajectories of `skyrl_mega.evaluate`, as a multiple of the concurrent sequences of all engines: some
trajectories wait for their environments."""


def evaluation_concurrency(config: Config, endpoint: bool) -> int:
    """Returns the number of concurrent trajectories of `skyrl_mega.evaluate`: `rollout.concurrency` on an endpoint,
    `AHEAD` × `rollout.concurrency` × engines on engines started for the evaluation."""
    return config.rollout.concurrency * (1 if endpoint else AHEAD * config.rollout.engines)


def engine_count(config: Config) -> int:
    """Returns the number of the run's engines plus the servers of `rollout.endpoints`, at least 1."""
    return max(1, config.rollout.engines + len(config.rollout.endpoints))


def policy_ranks(config: Config) -> int:
    """Returns the number of policy ranks: `policy.ranks`, or all GPUs of the cluster if null."""
    return config.policy.ranks or config.cluster.nodes * config.cluster.gpus_per_node


def reference_ranks(config: Config) -> int:
    """Returns the number of reference ranks on separate GPUs: `reference.ranks`, or as many as the policy if null.

    Returns 0 without `reference.layout`: a reference then shares the policy's ranks.
    """
    return (config.reference.ranks or policy_ranks(config)) if config.reference.layout else 0


def has_critic(config: Config) -> bool:
    """Returns True if the advantage estimator needs a critic, as gae does."""
    return config.algorithm.advantage_traits.critic


def critic_ranks(config: Config) -> int:
    """Returns the number of critic ranks: `critic.ranks`, or as many as the policy if null; 0 without a critic."""
    return (config.critic.ranks or policy_ranks(config)) if has_critic(config) else 0


def critic_layout(config: Config) -> LayoutConfig:
    """Returns the critic's parallel layout: `critic.layout`, or the policy's layout if null; also without a critic."""
    return config.critic.layout or config.policy.layout


def critic_model(config: Config) -> PolicyConfig:
    """Returns the critic's settings as a PolicyConfig, without replay of routes; settings missing in the critic are
    copied from the policy. `ranks` is 0 without a critic."""
    critic = config.critic
    return replace(
        config.policy,
        ranks=critic_ranks(config),
        layout=critic_layout(config),
        optimizer=critic.optimizer,
        micro_tokens=critic.micro_tokens or config.policy.micro_tokens,
        moe=replace(config.policy.moe, replay="off"),  # the critic does not replay routes
    )


def micro_tokens(policy: PolicyConfig) -> int:
    """Returns the token budget of a micro-batch.

    Raises:
        ValueError: `policy.micro_tokens` is null, and `planner.micro_tokens` has not chosen a number yet.
    """
    if policy.micro_tokens is None:
        raise ValueError("policy.micro_tokens has not been decided")
    return policy.micro_tokens


def planned_device(config: Config) -> str:
    """Returns `cpu` or `cuda` without looking at the machine: auto is planned as CUDA."""
    return "cpu" if config.cluster.device == "cpu" else "cuda"


def overlaps(policy: PolicyConfig, device: str) -> bool:
    """Returns True if the policy overlaps communication with computation: `policy.overlap`, or on CUDA if null."""
    return device == "cuda" if policy.overlap is None else policy.overlap


def shares_prefixes(policy: PolicyConfig, context: int) -> bool:
    """Returns True if a model with the policy's settings and `context` context ranks computes common first tokens of
    sequences once (`policy.share_prefixes`)."""
    return policy.share_prefixes and context == 1


FUSIONS = ("rope", "permute", "router", "swiglu")
"""Valid values in `policy.fusions`."""
MOE_FUSIONS = frozenset({"permute", "router"})
"""Fusions used only by models with experts."""


def fused(policy: PolicyConfig, spec: str, experts: bool) -> frozenset[str]:
    """Returns the enabled fusions: `policy.fusions`, or by default every fusion with an unchanged result.

    A fused router chooses experts internally: replaying routes is impossible, and no tensor of scores is exposed for an
    auxiliary loss.

    Args:
        policy: The settings, already checked by `config.checks.policy`.
        spec: Layer implementation, `te` or `local`; only `te` has fused kernels.
        experts: True if the model has experts; otherwise the fusions for experts (`MOE_FUSIONS`) are left out.
    """
    if spec != "te":
        return frozenset()
    wanted = frozenset(FUSIONS if policy.fusions is None else policy.fusions)
    if not experts:
        return wanted - MOE_FUSIONS
    if policy.fusions is None and (policy.moe.replay != "off" or policy.moe.aux_loss):
        return wanted - {"router"}
    return wanted


def logit_chunk(policy: PolicyConfig, device: str) -> int | None:
    """Returns the number of tokens with logits in memory at once on this device (`cpu` or `cuda`); None with the fused
    head, because no logits are stored."""
    fused = device == "cuda" if policy.head == "auto" else policy.head == "fused"
    return None if fused else policy.logit_chunk


def gpus_needed(config: Config) -> int:
    """Returns the number of GPUs of `cluster.nodes` for policy, reference, critic and engines; colocated GPUs count
    once, and engines in a pool of their own do not count."""
    elsewhere = config.cluster.shared or config.cluster.pools.engines is not None
    engine_gpus = 0 if elsewhere else config.rollout.engines * engine_ranks(config.rollout)
    return policy_ranks(config) + reference_ranks(config) + critic_ranks(config) + engine_gpus


def idle_gpus_note(config: Config) -> str | None:
    """Returns a note for the user about GPUs without work, assuming a run on CUDA; None if all GPUs are used."""
    engines, policy = config.rollout.engines * engine_ranks(config.rollout), policy_ranks(config)
    total = config.cluster.nodes * config.cluster.gpus_per_node
    engines_text = f"rollout.engines={config.rollout.engines} of {engine_ranks(config.rollout)} GPUs"
    if config.cluster.shared and engines < policy:
        return f"{engines_text}: {policy - engines} of the policy's {policy} GPUs have no engine and generate nothing"
    pool = config.cluster.pools.engines
    if pool and engines < (has := pool.nodes * pool.gpus_per_node):
        return f"{has - engines} of {has} GPUs of cluster.pools.engines are unused: {engines_text} take {engines}"
    if (needed := gpus_needed(config)) < total:
        trained = "policy, reference, critic" if has_critic(config) else "policy, reference"
        takers = trained if pool else f"{trained} and engines ({engines_text})"
        return f"{total - needed} of {total} GPUs are unused: {takers} take {needed}"
    return None


def generates_ahead(asynchrony: AsynchronyConfig) -> bool:
    """Returns True if a step may train on tokens sampled before the last weight sync. Optimizer steps of the same step,
    which also change the weights after sampling, do not count."""
    return asynchrony.mode != "off" and asynchrony.max_staleness > 0


ROUNDING = 1e-9
"""Tolerance for floating point error when a setting times a count should be a whole number."""


def max_open_trajectories(config: Config, evaluated: int = 0) -> int:
    """Returns the maximum number of concurrent trajectories and environments: the trajectories of a step, with
    `asynchrony.mode=full` of this step and `max_staleness` steps ahead, prompts of `dynamic_sampling.oversample`
    included. At most as many as environments may be open (`environment_slots`), even with an evaluation.

    Args:
        config: The settings.
        evaluated: Trajectories of an evaluation. Added if `asynchrony.mode` is not off; otherwise never open together
            with training trajectories, so the larger number counts.
    """
    dynamic, asynchrony = config.algorithm.dynamic_sampling, config.asynchrony
    prompts = math.ceil(config.data.prompts_per_step * (dynamic.oversample if dynamic.enabled else 1.0) - ROUNDING)
    steps = asynchrony.max_staleness + 1 if asynchrony.mode == "full" else 1
    trained = prompts * config.data.samples_per_prompt * min(steps, config.run.steps or steps)
    most = trained + evaluated if asynchrony.mode != "off" else max(trained, evaluated)
    slots = environment_slots(config.environment)
    return most if slots is None else min(most, slots)


def cutoff_note(config: Config) -> str | None:
    """Returns a note if training samples come from a truncated distribution (top_p, top_k), else None; None also at
    temperature 0."""
    sampling = config.rollout.sampling
    cuts = [f"top_p={sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top_k={sampling.top_k}"] * (sampling.top_k > 0)
    if not cuts or config.rollout.sampling.temperature == 0:
        return None
    capped = "" if config.algorithm.importance_cap is None else ", and algorithm.importance_cap corrects for it too"
    return (
        f"rollout.sampling.{', '.join(cuts)}: tokens are sampled from a truncated distribution and the policy is "
        f"trained over the whole: mismatch/* stays above 0 even with a perfect engine{capped} (docs/recipes.md)"
    )


def expert_parallel(rollout: RolloutConfig) -> bool:
    """Returns True if engines use expert parallelism: each worker has whole experts (`enable_expert_parallel`)."""
    return bool(rollout.options.get("enable_expert_parallel"))


def engine_data(rollout: RolloutConfig) -> int:
    """Returns the number of data-parallel replicas inside an engine; experts are distributed over all replicas. 1 if
    not given; ValueError for a text without a number."""
    return int(rollout.options.get("data_parallel_size") or 1)


def engine_ranks(rollout: RolloutConfig) -> int:
    """Returns the number of workers (GPUs) per engine: tensor parallel size × data-parallel replicas."""
    return rollout.tensor * engine_data(rollout)


def replica_concurrency(rollout: RolloutConfig) -> int:
    """Returns the maximum number of running sequences of each data-parallel replica: the replicas share
    `rollout.concurrency` evenly."""
    return -(-rollout.concurrency // engine_data(rollout))


def eager(rollout: RolloutConfig, device: str) -> bool:
    """Returns True if engines run without compilation and CUDA graphs: `rollout.eager`, or on a CPU if null.

    Args:
        rollout: The settings.
        device: `cpu`, `cuda` or `auto`; `auto` counts as CUDA.
    """
    return device == "cpu" if rollout.eager is None else rollout.eager


ONLINE_FP8 = "fp8_per_block"
"""vLLM's online quantization of weights received in a weight sync (`rollout.options.quantization`)."""
WIDE_CACHES = (None, "auto", "bfloat16", "float16")
"""Values of `rollout.options.kv_cache_dtype` with more than a byte per element; all other values use at most a byte."""


def fp8_parameters(rollout: RolloutConfig) -> bool:
    """Returns True if engines use the parameters of an FP8 checkpoint: numbers plus a scale for every block."""
    overrides = rollout.options.get("hf_overrides")
    return isinstance(overrides, dict) and bool(overrides.get("quantization_config"))


def fp8_weights(rollout: RolloutConfig) -> bool:
    """Returns True if engines store linear layers in FP8, from an FP8 checkpoint or by online quantization."""
    return fp8_parameters(rollout) or rollout.options.get("quantization") == ONLINE_FP8


def small_cache(rollout: RolloutConfig) -> bool:
    """Returns True if an element of the KV cache takes at most a byte."""
    return rollout.options.get("kv_cache_dtype") not in WIDE_CACHES


NARROW_CACHES = (
    *("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head"),
    *("int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "ultraquant_4bit"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
"""Remaining values of vLLM's `CacheDType`, with at most a byte per element."""


def engine_precision(config: Config) -> str:
    """Returns the number format of the engines: `float32`, `bfloat16`, or `fp8` if weights or cache use FP8."""
    fp8 = fp8_weights(config.rollout) or small_cache(config.rollout) or config.weights.wire.startswith("fp8")
    return "fp8" if fp8 else config.model.dtype


def response_limit(rollout: RolloutConfig) -> int:
    """Returns the maximum number of tokens after the prompt, over all turns: `rollout.max_response_tokens`, or
    `max_turns` × `sampling.max_tokens` if null."""
    return rollout.max_response_tokens or rollout.max_turns * rollout.sampling.max_tokens


def length_limit(rollout: RolloutConfig) -> int:
    """Returns the maximum number of tokens per sequence: `rollout.max_length`, or prompt + response limit if null."""
    return rollout.max_length or rollout.max_prompt_tokens + response_limit(rollout)


def evaluation_sampling(config: Config) -> SamplingConfig:
    """Returns the sampling settings of an evaluation: the training settings, with temperature, top_p and
    max_tokens of `evaluation` where given (not null)."""
    sampling, evaluation = config.rollout.sampling, config.evaluation
    return replace(
        sampling,
        temperature=sampling.temperature if evaluation.temperature is None else evaluation.temperature,
        top_p=sampling.top_p if evaluation.top_p is None else evaluation.top_p,
        max_tokens=evaluation.max_tokens or sampling.max_tokens,
    )


POLICY_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # otherwise cuBLAS shares a workspace between streams
    "NCCL_ALGO": "Ring",  # otherwise NCCL chooses by size and load
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # backward pass of Transformer Engine's attention
}
"""Environment variables of a policy rank on a GPU, set before start."""
ENGINE_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
"""Environment variables of an engine on a GPU."""
DETERMINISTIC = "deterministic_mode"
"""megatron-core's option for deterministic computation."""


def policy_settings(config: Config) -> PolicyConfig:
    """Returns `config.policy`; if `run.deterministic` is true, a copy with Megatron's deterministic option switched on.
    A value given for this option in `policy.options` stays."""
    if not config.run.deterministic:
        return config.policy
    return replace(config.policy, options={DETERMINISTIC: True, **config.policy.options})


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def on_driver_node(environment: EnvironmentConfig) -> bool:
    """Returns True if rollout workers must run on the driver's node because the retrieval service listens only on
    loopback: a service started by the run (`retriever.index`), or a `retriever.url` on loopback."""
    url = environment.retriever.url
    return urlsplit(url).hostname in LOOPBACK if url else environment.retriever.index is not None


def share_of(total: int, among: int, place: int) -> int:
    """Returns the part of a run-wide total for one of several processes: an even division, but at least 1, so that the
    parts may exceed a total smaller than `among`.

    Args:
        total: The run-wide number, such as threads.
        among: Number of processes, at least 1.
        place: Index of the process, from 0; the first processes get the remainder.
    """
    return max(1, total // among + (place < total % among))
