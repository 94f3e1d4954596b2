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
    compares_samples,
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
    """Raises UserError for the first impossible setting. `planned`: nothing will be started, so settings supported only
    in a plan are accepted, and `cluster.device = auto` means GPUs.

    Raises:
        UserError: key, value, allowed values, fix.
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
        UserError: key, value, allowed values, fix.
    """
    check_values(config)
    _paths(config)
    _name(config)
    _rollout(config)
    if config.rollout.conversation != "messages" and not engines:
        raise UserError(
            f"rollout.conversation = {config.rollout.conversation}: an endpoint takes messages and renders them; "
            "give rollout.conversation=messages, or evaluate without --endpoint"
        )
    if engines:
        _model(config)
        check_topology(config)
        _engines(config)


def check_values(config: Config) -> None:
    """Checks every single value against the rule of its key."""
    for name, value in _values(config, ""):
        if not (key := keys()[name]).allows(value):
            raise UserError(f"{name} = {shown(value)}: {key.refusal(value)}")


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
            f"warmup.steps = {c.warmup.steps}: it needs warmup.files, parquet files with extra_info.demonstration; "
            "give some, or warmup.steps=0"
        )


def _name(c: Config) -> None:
    if not re.fullmatch(r"[\w.+-]+", c.run.name) or not c.run.name.strip("."):
        raise UserError(
            f"run.name = {c.run.name}: allowed are letters, digits and . _ + -; use run.directory for folders"
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
                raise UserError(f"{key} = {shown(path)}: allowed are names of at most {LONGEST_NAME} bytes")


def _model(c: Config) -> None:
    if not c.model.path:
        raise UserError(
            "model.path is not set: allowed is a Hugging Face directory (with model.build it is made there)"
        )
    if c.model.build and c.model.build.architecture == "qwen3_moe":
        b = c.model.build
        if b.experts < 1:
            raise UserError(f"model.build.experts = {b.experts}: qwen3_moe needs at least 1; or architecture=qwen3")
        if b.experts_per_token > b.experts:
            raise UserError(
                f"model.build.experts_per_token = {b.experts_per_token}: allowed is at most model.build.experts = "
                f"{b.experts}"
            )


def _data(c: Config) -> None:
    if not c.data.train:
        raise UserError(
            "data.train is empty: allowed is a list of parquet files, data.train=[data/gsm8k/train.parquet]"
        )
    step, mini = c.data.prompts_per_step, c.data.mini_batch_prompts
    if mini and step % mini:
        raise UserError(
            f"data.mini_batch_prompts = {mini}: it does not divide data.prompts_per_step = {step}; choose a divisor"
        )


def _algorithm(c: Config) -> None:
    a, samples, compares = c.algorithm, c.data.samples_per_prompt, compares_samples(c.algorithm)
    if samples < 2 and (compares or a.dynamic_sampling.enabled):
        why = f"algorithm.advantage={a.advantage}" if compares else "algorithm.dynamic_sampling"
        alternatives = ["algorithm.advantage=reinforce"] if compares else []
        alternatives += ["algorithm.dynamic_sampling.enabled=false"] if a.dynamic_sampling.enabled else []
        raise UserError(
            f"data.samples_per_prompt = {samples}: {why} compares the samples of a prompt and needs at least 2; "
            f"or give {' and '.join(alternatives)}"
        )
    if samples > 1 and c.rollout.sampling.temperature == 0:
        raise UserError(
            f"rollout.sampling.temperature = 0: the {samples} samples of a prompt would all be the same; "
            "allowed for training is a number above 0"
        )
    if not a.kl.coefficient:
        for name in ("path", "layout", "ranks"):
            if getattr(c.reference, name) is not None:
                raise UserError(
                    f"reference.{name} is set: it needs algorithm.kl.coefficient above 0; set that, or null"
                )
    elif c.warmup.steps and c.reference.path is None:
        raise UserError(
            f"algorithm.kl.coefficient = {a.kl.coefficient}: the reference would be the model before its warm-up "
            f"(warmup.steps = {c.warmup.steps}); give reference.path, a coefficient of 0, or warmup.steps=0"
        )
    if c.reference.ranks is not None and c.reference.layout is None:
        raise UserError(
            f"reference.ranks = {c.reference.ranks}: it needs reference.layout; without one the policy's ranks are "
            "shared"
        )
    if a.overlong.buffer > response_limit(c.rollout):
        raise UserError(
            f"algorithm.overlong.buffer = {a.overlong.buffer}: allowed is at most the "
            f"{response_limit(c.rollout)} tokens of a "
            "response (rollout.max_response_tokens)"
        )


def _rollout(c: Config) -> None:
    r, s = c.rollout, c.rollout.sampling
    if s.top_k == 0:
        raise UserError("rollout.sampling.top_k = 0: allowed is -1 (all) or at least 1")
    for name, value in (("rollout.sampling.top_p", s.top_p), ("evaluation.top_p", c.evaluation.top_p)):
        if value == 0:
            raise UserError(f"{name} = 0: allowed is a number above 0 and at most 1")
    retriever = c.environment.retriever
    if retriever.url is not None and not _is_address(retriever.url):
        raise UserError(f"environment.retriever.url = {shown(retriever.url)}: allowed is http://host:port or https://…")
    if (retriever.url or retriever.index) and retriever.timeout_s >= r.env_timeout_s:
        raise UserError(
            f"environment.retriever.timeout_s = {retriever.timeout_s:g}: allowed is less than rollout.env_timeout_s = "
            f"{r.env_timeout_s:g}, so that a search that fails is told to the policy"
        )
    if (c.evaluation.max_tokens or 0) > response_limit(c.rollout):
        raise UserError(
            f"evaluation.max_tokens = {c.evaluation.max_tokens}: allowed is at most {response_limit(c.rollout)}, the "
            "tokens of a whole response; raise rollout.max_response_tokens, or give less"
        )
    if s.max_tokens > response_limit(c.rollout):
        raise UserError(
            f"rollout.sampling.max_tokens = {s.max_tokens}: allowed is at most rollout.max_response_tokens = "
            f"{r.max_response_tokens}"
        )
    if r.max_input_tokens is not None and r.max_input_tokens < r.max_prompt_tokens:
        raise UserError(
            f"rollout.max_input_tokens = {r.max_input_tokens}: allowed is at least rollout.max_prompt_tokens = "
            f"{r.max_prompt_tokens}, or a prompt would have no turn; or null"
        )
    if r.max_length is not None and r.max_length <= r.max_prompt_tokens:
        raise UserError(
            f"rollout.max_length = {r.max_length}: allowed is more than rollout.max_prompt_tokens = "
            f"{r.max_prompt_tokens}; or null, which takes prompt + response"
        )
    if c.model.build and c.model.build.max_length < length_limit(c.rollout):
        raise UserError(
            f"model.build.max_length = {c.model.build.max_length}: allowed is at least "
            f"{length_limit(c.rollout)}, the longest "
            "sequence that rollout's limits allow"
        )
    _reject_controlled("rollout.options", r.options, ENGINE_ARGUMENTS)
    _reject_controlled("rollout.chat_template_options", r.chat_template_options, TEMPLATE_ARGUMENTS)
    for name in r.chat_template_options:
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(
                f"rollout.chat_template_options: {shown(name)}: allowed is the name of a template's variable"
            )


def _reject_controlled(key: str, options: dict[str, Any], controlled: dict[str, str | None]) -> None:
    """Rejects options controlled by the run itself."""
    for name in options:
        if name in controlled:
            fix = f"use {controlled[name]}" if controlled[name] else "leave it out"
            raise UserError(f"{key}.{name}: the run decides it; {fix}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        return False


def check_topology(c: Config) -> None:
    """Checks the links of a node, and the engine settings used by the transfer plan."""
    nics, gpus = c.cluster.topology.nics_per_node, c.cluster.gpus_per_node
    if nics is not None and nics > gpus:
        raise UserError(
            f"cluster.topology.nics_per_node = {nics}: allowed is at most cluster.gpus_per_node = {gpus}; count NICs "
            "of one GPU as one, with the sum of their nic_gb_s"
        )
    data = c.rollout.options.get("data_parallel_size", 1)
    if not isinstance(data, int) or data < 1:
        raise UserError(f"rollout.options.data_parallel_size = {data}: allowed is a whole number of at least 1")
    cache, allowed = c.rollout.options.get("kv_cache_dtype"), [*filter(None, WIDE_CACHES), *NARROW_CACHES]
    if cache is not None and cache not in allowed:
        raise UserError(
            f"rollout.options.kv_cache_dtype = {cache}: allowed is one of {', '.join(allowed)}; give fp8 for a byte an "
            "element, or auto"
        )


def _cluster(c: Config, planned: bool) -> None:
    check_topology(c)
    _engines(c, planned)
    if c.policy.spec == "te" and c.cluster.device == "cpu":
        raise UserError(
            "policy.spec = te: Transformer Engine computes on CUDA alone, and cluster.device is cpu; allowed there is "
            "local or auto"
        )
    if c.cluster.device == "cuda" or (planned and c.cluster.device == "auto"):
        check_gpus(c)


def _engines(c: Config, planned: bool = False) -> None:
    if (data := engine_data(c.rollout)) > 1 and not planned:
        raise UserError(
            f"rollout.options.data_parallel_size = {data}: not yet available in a run; --dry-run and "
            "python -m skyrl_mega.weights plan know it; give 1"
        )
    if c.cluster.device == "cpu" and c.rollout.options.get("enable_expert_parallel"):
        raise UserError("rollout.options.enable_expert_parallel: vLLM has no expert parallelism on a CPU; leave it out")


def check_enough(c: Config, prompts: int, what: str) -> None:
    """Raises UserError if the prompts do not suffice for a single step.

    Args:
        c: The settings.
        prompts: Number of prompts.
        what: Description of the prompts for the error message.
    """
    if c.run.steps != 0 and prompts * c.run.epochs < c.data.prompts_per_step:
        raise UserError(
            f"data.prompts_per_step = {c.data.prompts_per_step}: {prompts} {what}, and run.epochs = {c.run.epochs} "
            f"draws {prompts * c.run.epochs}, so that no step could be taken; give at most that, or more epochs"
        )


def check_gpus(c: Config, training: bool = True) -> None:
    """Raises UserError if the cluster has too few GPUs: policy, reference, critic (training only) and engines each need
    separate GPUs, except engines colocated with policy ranks. An engine must fit within a node."""
    node, total = c.cluster.gpus_per_node, c.cluster.nodes * c.cluster.gpus_per_node
    if c.rollout.tensor > node:
        raise UserError(f"rollout.tensor = {c.rollout.tensor}: allowed is at most cluster.gpus_per_node = {node}")
    engines = c.rollout.engines * engine_ranks(c.rollout)
    if not training:
        if engines > total:
            raise UserError(
                f"rollout.engines = {c.rollout.engines}: with rollout.tensor = {c.rollout.tensor} they need {engines} "
                f"GPUs, more than cluster.nodes · gpus_per_node = {total}; give fewer"
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
                f"{key}.layout.tensor = {layout.tensor}: it does not divide cluster.gpus_per_node = {node}, so some "
                "tensor parallel group would lie on two nodes; choose a divisor"
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
            f"policy.ranks = {c.policy.ranks or 'null'}: {parts} GPUs are more than cluster.nodes · "
            f"gpus_per_node = {total}; allowed is a sum of at most {total}: {fix}, or more nodes"
        )


def _check_shared(c: Config, engines: int, policy: int) -> None:
    """Checks that engine worker w can share the GPU of policy rank w."""
    if engines > policy:
        raise UserError(
            f"rollout.engines = {c.rollout.engines}: with cluster.shared the workers of all engines have GPUs of "
            f"policy ranks, and these are {engines} workers, more than policy.ranks = {policy}; allowed is at most "
            f"{policy // engine_ranks(c.rollout)} engines, or cluster.shared=false"
        )
    if c.cluster.gpus_per_node % c.rollout.tensor:
        raise UserError(
            f"rollout.tensor = {c.rollout.tensor}: with cluster.shared an engine has the GPUs of consecutive policy "
            f"ranks, and some would lie in two nodes; allowed are divisors of cluster.gpus_per_node = "
            f"{c.cluster.gpus_per_node}"
        )
