"""Checks of the settings, without a machine and without reading files.

Each error is a line of key, value, allowed values, fix. Checks of model, data or devices are in
`skyrl_mega.cli.inputs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import urlsplit

from skyrl_mega.config import megatron_options
from skyrl_mega.config.advantage_checks import check_advantage
from skyrl_mega.config.asynchrony_checks import check_asynchrony
from skyrl_mega.config.critic_checks import check_critic
from skyrl_mega.config.derived import (
    NARROW_CACHES,
    WIDE_CACHES,
    critic_ranks,
    engine_data,
    engine_ranks,
    gpus_needed,
    length_limit,
    policy_ranks,
    reference_ranks,
    response_limit,
)
from skyrl_mega.config.deterministic import check_deterministic
from skyrl_mega.config.environment_checks import check_environment
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.keys import keys
from skyrl_mega.config.loss_checks import check_loss
from skyrl_mega.config.optimizer_checks import check_optimizer
from skyrl_mega.config.precision import check_precision
from skyrl_mega.config.profile_checks import check_profile
from skyrl_mega.config.replay_checks import check_replay
from skyrl_mega.config.residency_checks import SLEEP_ARGUMENTS, check_residency
from skyrl_mega.config.sample_checks import check_samples
from skyrl_mega.config.schema import Config
from skyrl_mega.config.speed_checks import check_speed
from skyrl_mega.config.unused_settings import check_unused
from skyrl_mega.config.values import shown
from skyrl_mega.config.wire_checks import check_wire

ENGINE_ARGUMENTS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor",
    "pipeline_parallel_size": "rollout.tensor",
    "max_model_len": "rollout.max_length",
    "max_num_seqs": "rollout.concurrency",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.eager",
    "generation_config": "rollout.sampling",
    "logprobs_mode": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "load_format": None,
    "enable_return_routed_experts": "policy.moe.replay=rollout",
    **SLEEP_ARGUMENTS,
}
"""vLLM arguments controlled by the run → the setting to use instead (None: no such setting)."""

TEMPLATE_ARGUMENTS = {
    "messages": None,
    "conversation": None,
    "tools": "an environment with tools (docs/tools.md)",
    "chat_template": "chat_template.jinja in the folder of model.path",
    "add_generation_prompt": None,
    "continue_final_message": "rollout.conversation",
    "tokenize": None,
    "tokenizer_kwargs": None,
    "padding": None,
    "truncation": None,
    "max_length": "rollout.max_prompt_tokens",
    "return_tensors": None,
    "return_dict": None,
    "return_assistant_tokens_mask": None,
}
"""Arguments of a tokenizer's `apply_chat_template` controlled by the run → the replacement to use (None: none)."""

LONGEST_NAME = 255
"""Maximum bytes of a file name."""


def check(config: Config, *, planned: bool = False) -> None:
    """Checks all settings and their relations, and raises for the first impossible setting.

    Args:
        config: The settings.
        planned: True if nothing will be started. Settings supported only in a plan are then accepted, and
            `cluster.device=auto` means GPUs.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    check_values(config)
    _paths(config)
    _run(config)
    check_optimizer(config.policy.optimizer, "policy.optimizer")
    check_critic(config)
    check_optimizer(config.critic.optimizer, "critic.optimizer")
    megatron_options.check(config.policy, config.critic)
    _data(config)
    _algorithm(config)
    check_advantage(config)
    check_samples(config)
    check_loss(config)
    check_unused(config)
    check_replay(config)
    check_speed(config)
    check_residency(config)
    check_asynchrony(config)
    check_precision(config)
    check_profile(config)
    check_deterministic(config)
    check_environment(config)
    _rollout(config)
    check_wire(config)
    _cluster(config, planned)


def check_evaluation(config: Config, engines: bool = True) -> None:
    """Raises UserError for settings with which no evaluation can run; settings used only in training are not checked.

    Args:
        config: The settings.
        engines: True if the evaluation starts engines, False for an endpoint.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    check_values(config)
    _paths(config)
    _name(config)
    _rollout(config)
    if config.rollout.conversation != "messages" and not engines:
        raise UserError(
            "an endpoint takes messages and renders them",
            key="rollout.conversation",
            value=config.rollout.conversation,
            fix="give rollout.conversation=messages, or evaluate without --endpoint",
        )
    if engines:
        _model(config)
        check_topology(config)
        _engines(config)


def check_values(config: Config) -> None:
    """Checks every single value against the type and range of its key.

    Raises:
        UserError: A value is not allowed.
    """
    for name, value in _values(config, ""):
        if not (key := keys()[name]).allows(value):
            raise UserError(key.refusal(value), key=name, value=shown(value))


def _values(settings: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _run(c: Config) -> None:
    _name(c)
    _model(c)
    if c.warmup.steps and not c.warmup.files:
        raise UserError(
            "it needs warmup.files, parquet files with extra_info.demonstration; give some, or warmup.steps=0",
            key="warmup.steps",
            value=c.warmup.steps,
        )


def _name(c: Config) -> None:
    if not re.fullmatch(r"[\w.+-]+", c.run.name) or not c.run.name.strip("."):
        raise UserError(
            "allowed are letters, digits and . _ + -; use run.directory for folders", key="run.name", value=c.run.name
        )


def _paths(c: Config) -> None:
    """Rejects paths with a component longer than a file name may be: file systems raise an error for such a path."""
    paths_by_key = {
        "run.name": [c.run.name],
        "run.directory": [c.run.directory],
        "model.path": [c.model.path],
        "reference.path": [c.reference.path or ""],
        "critic.path": [c.critic.path or ""],
        "data.train": c.data.train,
        "data.eval": c.data.eval,
        "warmup.files": c.warmup.files,
        "environment.retriever.index": [c.environment.retriever.index or ""],
    }
    for key, paths in paths_by_key.items():
        for path in paths:
            if any(len(part.encode()) > LONGEST_NAME for part in path.split("/")):
                raise UserError(f"allowed are names of at most {LONGEST_NAME} bytes", key=key, value=shown(path))


def _model(c: Config) -> None:
    if not c.model.path:
        raise UserError(
            "model.path is not set: allowed is a Hugging Face directory (with model.build it is made there)"
        )
    if c.model.build and c.model.build.architecture == "qwen3_moe":
        b = c.model.build
        if b.experts < 1:
            raise UserError(
                "qwen3_moe needs at least 1; or architecture=qwen3", key="model.build.experts", value=b.experts
            )
        if b.experts_per_token > b.experts:
            raise UserError(
                f"allowed is at most model.build.experts = {b.experts}",
                key="model.build.experts_per_token",
                value=b.experts_per_token,
            )


def _data(c: Config) -> None:
    if not c.data.train:
        raise UserError(
            "data.train is empty: allowed is a list of parquet files, data.train=[data/gsm8k/train.parquet]"
        )
    step, mini = c.data.prompts_per_step, c.data.mini_batch_prompts
    if mini and step % mini:
        raise UserError(
            f"it does not divide data.prompts_per_step = {step}; choose a divisor",
            key="data.mini_batch_prompts",
            value=mini,
        )


def _algorithm(c: Config) -> None:
    a, samples, compares = c.algorithm, c.data.samples_per_prompt, c.algorithm.advantage_traits.compares
    if samples < 2 and (compares or a.dynamic_sampling.enabled):
        why = f"algorithm.advantage={a.advantage}" if compares else "algorithm.dynamic_sampling"
        alternatives = ["algorithm.advantage=reinforce"] if compares else []
        alternatives += ["algorithm.dynamic_sampling.enabled=false"] if a.dynamic_sampling.enabled else []
        raise UserError(
            f"{why} compares the samples of a prompt and needs at least 2",
            key="data.samples_per_prompt",
            value=samples,
            fix=f"or give {' and '.join(alternatives)}",
        )
    if samples > 1 and c.rollout.sampling.temperature == 0:
        raise UserError(
            f"the {samples} samples of a prompt would all be the same; allowed for training is a number above 0",
            key="rollout.sampling.temperature",
            value="0",
        )
    if not a.kl.coefficient:
        for name in ("path", "layout", "ranks"):
            if getattr(c.reference, name) is not None:
                raise UserError(
                    f"reference.{name} is set: it needs algorithm.kl.coefficient above 0", fix="set that, or null"
                )
    elif c.warmup.steps and c.reference.path is None:
        raise UserError(
            f"the reference would be the model before its warm-up (warmup.steps = {c.warmup.steps}"
            "); give reference.path, a coefficient of 0, or warmup.steps=0",
            key="algorithm.kl.coefficient",
            value=a.kl.coefficient,
        )
    if c.reference.ranks is not None and c.reference.layout is None:
        raise UserError(
            "it needs reference.layout; without one the policy's ranks are shared",
            key="reference.ranks",
            value=c.reference.ranks,
        )
    if a.overlong.buffer > response_limit(c.rollout):
        raise UserError(
            f"allowed is at most the {response_limit(c.rollout)} tokens of a response (rollout.max_response_tokens)",
            key="algorithm.overlong.buffer",
            value=a.overlong.buffer,
        )


def _rollout(c: Config) -> None:
    r, s = c.rollout, c.rollout.sampling
    if s.top_k == 0:
        raise UserError("allowed is -1 (all) or at least 1", key="rollout.sampling.top_k", value="0")
    for name, value in (("rollout.sampling.top_p", s.top_p), ("evaluation.top_p", c.evaluation.top_p)):
        if value == 0:
            raise UserError("allowed is a number above 0 and at most 1", key=name, value="0")
    retriever = c.environment.retriever
    if retriever.url is not None and not _is_address(retriever.url):
        raise UserError(
            "allowed is http://host:port or https://…", key="environment.retriever.url", value=shown(retriever.url)
        )
    if (retriever.url or retriever.index) and retriever.timeout_s >= r.env_timeout_s:
        raise UserError(
            f"allowed is less than rollout.env_timeout_s = {r.env_timeout_s:g}, so that a search "
            "that fails is told to the policy",
            key="environment.retriever.timeout_s",
            value=f"{retriever.timeout_s:g}",
        )
    if (c.evaluation.max_tokens or 0) > response_limit(c.rollout):
        raise UserError(
            f"allowed is at most {response_limit(c.rollout)}, the tokens of a whole response; "
            "raise rollout.max_response_tokens, or give less",
            key="evaluation.max_tokens",
            value=c.evaluation.max_tokens,
        )
    if s.max_tokens > response_limit(c.rollout):
        raise UserError(
            f"allowed is at most rollout.max_response_tokens = {r.max_response_tokens}",
            key="rollout.sampling.max_tokens",
            value=s.max_tokens,
        )
    if r.max_input_tokens is not None and r.max_input_tokens < r.max_prompt_tokens:
        raise UserError(
            f"allowed is at least rollout.max_prompt_tokens = {r.max_prompt_tokens}, or a prompt "
            "would have no turn; or null",
            key="rollout.max_input_tokens",
            value=r.max_input_tokens,
        )
    if r.max_length is not None and r.max_length <= r.max_prompt_tokens:
        raise UserError(
            f"allowed is more than rollout.max_prompt_tokens = {r.max_prompt_tokens}; or null, "
            "which takes prompt + response",
            key="rollout.max_length",
            value=r.max_length,
        )
    if c.model.build and c.model.build.max_length < length_limit(c.rollout):
        raise UserError(
            f"allowed is at least {length_limit(c.rollout)}, the longest sequence that rollout's limits allow",
            key="model.build.max_length",
            value=c.model.build.max_length,
        )
    _reject_controlled("rollout.options", r.options, ENGINE_ARGUMENTS)
    _reject_controlled("rollout.chat_template_options", r.chat_template_options, TEMPLATE_ARGUMENTS)
    for name in r.chat_template_options:
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(
                f"{shown(name)}: allowed is the name of a template's variable", key="rollout.chat_template_options"
            )


def _reject_controlled(key: str, options: dict[str, Any], controlled: dict[str, str | None]) -> None:
    """Rejects options controlled by the run itself."""
    for name in options:
        if name in controlled:
            fix = f"use {controlled[name]}" if controlled[name] else "leave it out"
            raise UserError("the run decides it", key=f"{key}.{name}", fix=fix)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


def check_topology(c: Config) -> None:
    """Checks the links of a node, and the engine settings used by the transfer plan.

    Raises:
        UserError: A node has more NICs than GPUs, or vLLM's data-parallel size or cache type is not allowed.
    """
    nics, gpus = c.cluster.topology.nics_per_node, c.cluster.gpus_per_node
    if nics is not None and nics > gpus:
        raise UserError(
            f"allowed is at most cluster.gpus_per_node = {gpus}; count NICs of one GPU as one, "
            "with the sum of their nic_gb_s",
            key="cluster.topology.nics_per_node",
            value=nics,
        )
    data = c.rollout.options.get("data_parallel_size", 1)
    if not isinstance(data, int) or data < 1:
        raise UserError("allowed is a whole number of at least 1", key="rollout.options.data_parallel_size", value=data)
    cache, allowed = c.rollout.options.get("kv_cache_dtype"), [*filter(None, WIDE_CACHES), *NARROW_CACHES]
    if cache is not None and cache not in allowed:
        raise UserError(
            f"allowed is one of {', '.join(allowed)}; give fp8 for a byte an element, or auto",
            key="rollout.options.kv_cache_dtype",
            value=cache,
        )


def _cluster(c: Config, planned: bool) -> None:
    check_topology(c)
    _engines(c, planned)
    if c.policy.spec == "te" and c.cluster.device == "cpu":
        raise UserError(
            "Transformer Engine computes on CUDA alone, and cluster.device is cpu; allowed there is local or auto",
            key="policy.spec",
            value="te",
        )
    if c.cluster.device == "cuda" or (planned and c.cluster.device == "auto"):
        check_gpus(c)


def _engines(c: Config, planned: bool = False) -> None:
    if (data := engine_data(c.rollout)) > 1 and not planned:
        raise UserError(
            "not yet available in a run; --dry-run and python -m skyrl_mega.weights plan know it; give 1",
            key="rollout.options.data_parallel_size",
            value=data,
        )
    if c.cluster.device == "cpu" and c.rollout.options.get("enable_expert_parallel"):
        raise UserError(
            "vLLM has no expert parallelism on a CPU", key="rollout.options.enable_expert_parallel", fix="leave it out"
        )


def check_enough(c: Config, prompts: int, what: str) -> None:
    """Raises UserError if the prompts do not suffice for a single step.

    Args:
        c: The settings.
        prompts: Number of prompts.
        what: Description of the prompts for the error message.
    """
    if c.run.steps != 0 and prompts * c.run.epochs < c.data.prompts_per_step:
        raise UserError(
            f"{prompts} {what}, and run.epochs = {c.run.epochs} draws {prompts * c.run.epochs}, "
            "so that no step could be taken; give at most that, or more epochs",
            key="data.prompts_per_step",
            value=c.data.prompts_per_step,
        )


def check_gpus(c: Config, training: bool = True) -> None:
    """Checks that the cluster has enough GPUs: policy, reference, critic (`training` only) and engines each need
    separate GPUs, except engines colocated with policy ranks. An engine must fit within a node. Raises UserError
    otherwise."""
    node, total = c.cluster.gpus_per_node, c.cluster.nodes * c.cluster.gpus_per_node
    if c.rollout.tensor > node:
        raise UserError(
            f"allowed is at most cluster.gpus_per_node = {node}", key="rollout.tensor", value=c.rollout.tensor
        )
    engines = c.rollout.engines * engine_ranks(c.rollout)
    if not training:
        if engines > total:
            raise UserError(
                f"with rollout.tensor = {c.rollout.tensor} they need {engines} GPUs, more than "
                f"cluster.nodes · gpus_per_node = {total}; give fewer",
                key="rollout.engines",
                value=c.rollout.engines,
            )
        return
    policy, reference, critic = policy_ranks(c), reference_ranks(c), critic_ranks(c)
    for key, layout, ranks in (
        ("policy", c.policy.layout, policy),
        ("reference", c.reference.layout, reference),
        ("critic", c.critic.layout, critic),
    ):
        if layout is not None and ranks > node and node % layout.tensor:
            raise UserError(
                f"it does not divide cluster.gpus_per_node = {node}, so some tensor parallel "
                "group would lie on two nodes"
                "; choose a divisor",
                key=f"{key}.layout.tensor",
                value=layout.tensor,
            )
    if c.cluster.shared:
        _check_shared(c, engines, policy)
        engines = 0
    if gpus_needed(c) > total:
        remaining = {"reference": reference, "critic": critic, "engines": engines}
        parts = f"policy {policy}" + "".join(f" + {name} {count}" for name, count in remaining.items() if count)
        explicit = {"reference": c.reference.ranks, "critic": c.critic.ranks, "engines": engines}
        # roles without an explicit number use as many ranks as the policy
        following = sum(count > 0 and not explicit[name] for name, count in remaining.items())
        available = (total - sum(count for name, count in remaining.items() if explicit[name])) // (1 + following)
        fix = f"policy.ranks={available}" if available > 0 else "fewer rollout.engines"
        if c.cluster.shared and 0 < available < c.rollout.engines * engine_ranks(c.rollout):
            max_engines = available // engine_ranks(c.rollout)  # each engine worker shares the GPU of a policy rank
            fix += f" rollout.engines={max_engines}" if max_engines else " with smaller engines (rollout.tensor)"
        raise UserError(
            f"{parts} GPUs are more than cluster.nodes · gpus_per_node = {total}; allowed is a "
            f"sum of at most {total}: {fix}, or more nodes",
            key="policy.ranks",
            value=c.policy.ranks or "null",
        )


def _check_shared(c: Config, engines: int, policy: int) -> None:
    """Checks that engine worker w can share the GPU of policy rank w."""
    if engines > policy:
        raise UserError(
            "with cluster.shared the workers of all engines have GPUs of policy ranks, and these "
            f"are {engines} workers, more than policy.ranks = {policy}; allowed is at most "
            f"{policy // engine_ranks(c.rollout)} engines, or cluster.shared=false",
            key="rollout.engines",
            value=c.rollout.engines,
        )
    if c.cluster.gpus_per_node % c.rollout.tensor:
        raise UserError(
            "with cluster.shared an engine has the GPUs of consecutive policy ranks, and some "
            "would lie in two nodes; allowed are divisors of cluster.gpus_per_node = "
            f"{c.cluster.gpus_per_node}",
            key="rollout.tensor",
            value=c.rollout.tensor,
        )
