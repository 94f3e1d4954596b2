"""Memory checks based on the model's sizes, and the check of the weight sync's time limit.

Each error message names the violated number. An estimate is an error only if it is too large even after subtracting the
whole margin (`processes.MARGIN`), so refused settings could not have run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from skyrl_mega.cluster.run_placement import check_nodes
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_residency
from skyrl_mega.config.derived import policy_ranks, reference_ranks
from skyrl_mega.config.pools import engine_view
from skyrl_mega.config.sandboxes import sandboxes_mib
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.host_memory import host_memory
from skyrl_mega.planner.large_engines import no_engine_error
from skyrl_mega.planner.memory import (
    GIB,
    critic_dims,
    critic_memory,
    engine_memory,
    gpu_bytes,
    on_cpu,
    policy_memory,
    reference_memory,
    sampling_bytes,
)
from skyrl_mega.planner.placement import nodes
from skyrl_mega.planner.processes import EngineMemory, PolicyMemory
from skyrl_mega.planner.shared import describe_kinds, misfit, shared_gpus, stage_ranks

MIB = 2**20
RAY_KILLS = 0.95
"""Share of a node's memory above which Ray kills workers (RAY_memory_usage_threshold)."""


def parallel_of(config: Config) -> tuple[ParallelDims, ParallelDims | None]:
    """Returns the policy's grid, and the grid of a reference with a separate layout (else None).

    Raises:
        UserError: The sizes of a layout do not fit its ranks.
    """
    policy = ParallelDims.from_config(config.policy.layout, policy_ranks(config))
    if config.reference.layout is None:
        return policy, None
    return policy, ParallelDims.from_config(config.reference.layout, reference_ranks(config), key="reference.layout")


def check(config: Config, hf: Mapping[str, Any], *, strict: bool = False) -> None:
    """Checks the fit of the run on the nodes and in memory; on a CPU only the size of the engines' cache, and the fit
    in host memory. Layouts must have been checked (`cli.layout_checks.check_layouts`).

    Args:
        config: The settings, with `policy.micro_tokens` decided.
        hf: The model's config.json.
        strict: True to raise already if the plain estimates are too large; False subtracts the share `MARGIN`, by which
            an estimate may be too high.

    Raises:
        UserError: The run does not fit; one line with key, value and the exceeded limit. Only the first problem is
            raised; `problems` lists all. Or the model's family is unknown, or the files of drafts cannot be used.
    """
    if not on_cpu(config):
        check_nodes(config)
    if what := problem(config, architecture(hf).describe(hf), strict=strict):
        raise what


def problem(config: Config, decoder: Decoder, *, strict: bool = False) -> UserError | None:
    """Returns, without raising it, the first error of `problems`, with the same arguments; None if everything fits.

    Raises:
        UserError: The files of a draft model or head (`rollout.drafts`) cannot be used.
    """
    return next(problems(config, decoder, strict=strict), None)


def problems(config: Config, decoder: Decoder, *, strict: bool = False) -> Iterator[UserError]:
    """Yields an error for each kind of GPU and for the host if their memory is too small; none if everything fits.
    Raises none of these errors.

    A kind of GPU is a pipeline stage of policy, reference or critic, an engine worker, or a shared GPU. On CPUs only
    the size of the engines' cache and the host count.

    Args:
        config: The settings, with checked layouts and `policy.micro_tokens` decided.
        decoder: The model.
        strict: True to compare the plain estimates; False subtracts the share `MARGIN`, by which an estimate may be too
            high.

    Raises:
        UserError: The files of a draft model or head (`rollout.drafts`) cannot be used.
    """
    parallel, reference = parallel_of(config)
    if not on_cpu(config):
        yield from _gpu_problems(config, decoder, parallel, reference, strict)
    elif config.rollout.engines and not (engine := engine_memory(config, decoder)).starts():
        yield UserError(
            f"{_too_small(engine)}: raise it, or allow shorter sequences",
            key="rollout.kv_cache_gib",
            value=f"{config.rollout.kv_cache_gib:g}",
        )
    if of_host := host_problem(config, decoder, parallel, reference):
        yield of_host


def _gpu_problems(
    config: Config, decoder: Decoder, parallel: ParallelDims, reference: ParallelDims | None, strict: bool
) -> Iterator[UserError]:
    if no_engine := no_engine_error(config, decoder):
        yield no_engine
    gpu = gpu_bytes(config)
    critic = critic_dims(config)
    grids = [("policy", parallel, policy_memory)]
    grids += [("reference", reference, reference_memory)] if reference else []
    grids += [("critic", critic, critic_memory)] if critic else []
    for name, grid, measure in grids:
        for rank in stage_ranks(grid).values():
            memory = measure(config, decoder, grid, rank)
            needed = memory.peak if strict else memory.lower_bound
            if needed > gpu:
                yield _rank_problem(name, rank, memory, config)
    engine = engine_memory(config, decoder)
    fraction = f"{config.rollout.memory_fraction:g}"
    if not engine.starts(strict=strict):
        sampled = 2 * sampling_bytes(config, decoder) > engine.working
        many = f", most of it for rollout.concurrency = {config.rollout.concurrency} at once," if sampled else ""
        yield UserError(
            f"an engine worker may take {_gib(engine.budget)} GiB; the weights of rollout.tensor "
            f"{config.rollout.tensor} take {_gib(engine.weights)}, its work about {_gib(engine.working)}"
            f"{many} and the reserve {_gib(engine.reserve)}; {_too_small(engine)}: raise the fraction, or allow "
            "shorter sequences",
            key="rollout.memory_fraction",
            value=fraction,
            settings=("rollout.tensor", "rollout.concurrency") if sampled else ("rollout.tensor",),
        )

    def allowed(other: Config) -> bool:
        try:
            check_residency(other)
        except UserError:
            return False
        return host_problem(other, decoder, parallel, reference) is None

    if too_much := misfit(config, [*shared_gpus(config, decoder, parallel)], strict, allowed):
        yield too_much
    size = gpu_bytes(engine_view(config))
    if not config.cluster.shared and (engine.peak if strict else engine.lower_bound) > size:
        yield UserError(
            f"an engine worker takes {_gib(engine.budget)} GiB and, beside that, about "
            f"{_gib(engine.beside)} for CUDA and NCCL, more than a GPU's {_gib(size)}: lower the fraction",
            key="rollout.memory_fraction",
            value=fraction,
        )


def _too_small(engine: EngineMemory) -> str:
    """Returns the reason for which vLLM would not start: the size of the cache, and the size that it asks for."""
    windows = ", whose prompt is larger than its sliding windows" if engine.per_prompt else ""
    return (
        f"this leaves a KV cache of {max(0, engine.kv) / MIB:,.0f} MiB, and vLLM starts with at least "
        f"{ceil(engine.smallest_kv / MIB):,} for a sequence of {engine.longest:,} tokens{windows}"
    )


def _rank_problem(name: str, rank: int, needs: PolicyMemory, config: Config) -> UserError:
    resident = name == "critic" and not config.critic.optimizer.streamed
    hint = "; critic.optimizer.streamed = true has the optimizer's state in host memory" if resident else ""
    return UserError(
        f"rank {rank} needs about {_gib(needs.peak)} GiB ({describe_kinds(needs.phase(needs.busiest))}), at "
        f"least {_gib(needs.lower_bound)}; a GPU has {_gib(gpu_bytes(config))} (cluster.gpu_memory_gib){hint}",
        key=name,
        settings=("critic.optimizer.streamed",) if resident else (),
    )


def host_problem(
    config: Config, decoder: Decoder, parallel: ParallelDims, reference: ParallelDims | None
) -> UserError | None:
    """Returns, without raising it, the error for the first node whose estimated host memory exceeds the share
    `RAY_KILLS` of `cluster.host_memory_gib`, at which Ray ends processes; None if there is enough, or if the setting is
    null.

    Args:
        config: The settings, with `policy.micro_tokens` decided.
        decoder: The model.
        parallel: The policy's grid.
        reference: Grid of a reference with a separate layout; None without such a reference.

    Raises:
        UserError: On a CPU, the files of a draft model or head (`rollout.drafts`) cannot be used.
    """
    available = config.cluster.host_memory_gib
    if available is None:
        return None
    for number, node in enumerate(nodes(config)):
        memory = host_memory(config, decoder, parallel, reference, node, first=number == 0)
        if memory.total > RAY_KILLS * available * GIB:
            return UserError(
                f"node {number} needs about {_gib(memory.total)} GiB of host "
                f"memory ({describe_kinds(vars(memory))}); from {RAY_KILLS:.0%} on Ray ends processes: keep "
                "more of the state on GPUs, or take nodes with more memory",
                key="cluster.host_memory_gib",
                value=f"{available:g}",
            )
    return None


def check_sandboxes(config: Config, trajectories: int) -> None:
    """Checks the memory limits of the sandboxed programs of a standalone evaluation against the node's memory.

    Accepts everything if `cluster.host_memory_gib` is null.

    Args:
        config: The settings.
        trajectories: Number of concurrent trajectories.

    Raises:
        UserError: The programs may take more than the share `RAY_KILLS` of the node's memory.
    """
    available, required = config.cluster.host_memory_gib, int(sandboxes_mib(config, trajectories) * 2**20)
    if available is not None and required > RAY_KILLS * available * GIB:
        raise UserError(
            f"the sandboxed programs of {trajectories} trajectories at once may take "
            f"{_gib(required)} GiB of host memory; lower rollout.concurrency, or total_mib and "
            "disk_mib of environment.options (docs/sandbox.md)",
            key="cluster.host_memory_gib",
            value=f"{available:g}",
        )


def check_sync(config: Config, seconds: float) -> None:
    """Checks that the planned sync takes at most `weights.timeout_s` at the full rate of the links.

    Args:
        config: The settings.
        seconds: Planned duration of the sync.

    Raises:
        UserError: The sync takes longer.
    """
    if seconds > config.weights.timeout_s:
        raise UserError(
            f"the planned sync takes {seconds:.1f} s at least over links of cluster.topology; "
            f"give {ceil(2 * seconds)} or more",
            key="weights.timeout_s",
            value=f"{config.weights.timeout_s:g}",
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
