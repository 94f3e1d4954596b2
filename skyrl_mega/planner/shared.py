"""Memory of a GPU shared by a policy rank and an engine worker, by phase, and the error message if they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import floor

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import has_critic
from skyrl_mega.config.residency import CRITIC, ENGINE, POLICY, kept, resident
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.memory import GIB, engine_memory, gpu_bytes, on_cpu, policy_memory
from skyrl_mega.planner.processes import PHASES, EngineMemory, PolicyMemory, lower_bound


@dataclass(frozen=True)
class SharedGpu:
    """Policy rank and engine worker on the same GPU. Sizes in bytes."""

    rank: int
    """First policy rank of a pipeline stage, the fullest of the stage."""
    policy: PolicyMemory
    """Memory of the policy rank."""
    engine: EngineMemory
    """Memory of the engine worker."""
    size: int
    """GPU memory reported by CUDA."""

    def free(self, phase: str) -> int:
        """Returns the estimated free bytes in a phase; a negative number is a shortage."""
        return self.size - self.engine.totals[phase] - self.policy.totals[phase]

    @property
    def busiest(self) -> str:
        """Name of the phase with the least free memory."""
        return min(PHASES, key=self.free)

    @property
    def least_free(self) -> int:
        """Free bytes in the busiest phase; negative for a shortage."""
        return self.free(self.busiest)

    def needed(self, phase: str, strict: bool) -> float:
        """Returns the bytes of both processes in a phase; without `strict` the lower bound, with estimates reduced by
        the margin."""
        if strict:
            return self.engine.totals[phase] + self.policy.totals[phase]
        return self.engine.lower_bound_in(phase) + lower_bound(self.policy.phase(phase))

    def worst(self, strict: bool) -> str:
        """Returns the phase needing the most memory; with `strict` by plain estimates, else with estimates reduced by
        the margin."""
        return max(PHASES, key=lambda phase: self.needed(phase, strict))

    def fits(self, strict: bool) -> bool:
        """Returns True if policy and engine fit together in every phase; with `strict` by plain estimates, else with
        estimates reduced by the margin."""
        return self.needed(self.worst(strict), strict) <= self.size

    def with_keep(self, parts: Iterable[str]) -> SharedGpu:
        """Returns a copy with the parts `parts` as `residency.keep` of policy and engine."""
        keep = tuple(parts)
        return replace(self, policy=replace(self.policy, keep=keep), engine=replace(self.engine, keep=keep))

    def largest_budget(self, strict: bool) -> float:
        """Returns the largest budget of the engine in bytes (`EngineMemory.budget`) that fits beside the policy in
        every phase with a KV cache; may be smaller than the weights, or negative.

        Args:
            strict: True to compare the plain estimates; False subtracts the planner's margin (`fit.problem`).
        """
        with_cache = [phase for phase in PHASES if "kv_cache" in resident(phase, self.engine.keep)]
        return min(self.size - self.needed(phase, strict) for phase in with_cache) + self.engine.budget


def stage_ranks(parallel: ParallelDims) -> dict[int, int]:
    """Returns pipeline stage → first rank of the stage; no other rank of the stage holds more."""
    return {pp: pp * (parallel.ranks // parallel.pipeline) for pp in range(parallel.pipeline)}


def shared_gpus(config: Config, decoder: Decoder, parallel: ParallelDims) -> Iterator[SharedGpu]:
    """Yields the shared GPU of the first rank of each pipeline stage; none if policy and engines share no GPU, and none
    on CPUs. `parallel` is the policy's grid. Raises UserError if the files of a draft model or head (`rollout.drafts`)
    cannot be used, and ValueError if `policy.micro_tokens` is not decided."""
    if not config.cluster.shared or on_cpu(config):
        return
    engine, size = engine_memory(config, decoder), gpu_bytes(config)
    for rank in stage_ranks(parallel).values():
        yield SharedGpu(rank, policy_memory(config, decoder, parallel, rank), engine, size)


def fullest(gpus: Iterable[SharedGpu], phase: str) -> SharedGpu:
    """Returns the GPU with the least free memory in a phase; its stage may differ from phase to phase. Raises
    ValueError without any GPU."""
    return min(gpus, key=lambda gpu: gpu.free(phase))


def misfit(
    config: Config, gpus: Sequence[SharedGpu], strict: bool, allowed: Callable[[Config], bool]
) -> UserError | None:
    """Returns, without raising it, the error for the fullest GPU if policy and engine do not fit together, else None,
    also without a shared GPU.

    The message names the phase, the memory by kind, and settings that would fit.

    Args:
        config: The settings.
        gpus: A shared GPU of each pipeline stage (`shared_gpus`).
        strict: True to compare the plain estimates; False subtracts the planner's margin (`fit.problem`).
        allowed: Returns True if settings pass all other checks.
    """
    gpu = max(gpus, key=lambda gpu: gpu.needed(gpu.worst(strict), strict), default=None)
    if gpu is None or gpu.fits(strict):
        return None
    phase = gpu.worst(strict)
    engine, policy = gpu.engine.phase(phase), gpu.policy.phase(phase)
    together = "" if strict else f", together {_gib(gpu.needed(phase, strict))} at least by the estimates' margin,"
    stays = "; both stay there all the time" if config.residency.keep is None else ""
    return UserError(
        f"on shared GPUs, in phase {phase}, an engine "
        f"worker's {_gib(sum(engine.values()))} GiB ({describe_kinds(engine)}) and a policy rank's "
        f"{_gib(sum(policy.values()))} ({describe_kinds(policy)}){together} are more than the {_gib(gpu.size)} GiB of "
        f"a GPU{stays}; {_largest_fraction(config, gpus)}; {_smaller_keep(config, gpus, allowed)}",
        key="rollout.memory_fraction",
        value=f"{config.rollout.memory_fraction:g}",
        settings=("residency.keep",),
    )


def _largest_fraction(config: Config, gpus: Sequence[SharedGpu]) -> str:
    """Describes the largest `rollout.memory_fraction` fitting every GPU by the plain estimates."""
    size = gpus[0].size
    largest = floor(100 * min(gpu.largest_budget(strict=True) for gpu in gpus) / size) / 100
    engine = replace(gpus[0].engine, budget=int(largest * size))
    fits = all(replace(gpu, engine=engine).fits(strict=True) for gpu in gpus)
    if fits and engine.starts():
        return f"the largest fraction that fits is {largest:g}"
    return "no fraction fits"


def _smaller_keep(config: Config, gpus: Sequence[SharedGpu], allowed: Callable[[Config], bool]) -> str:
    """Describes the fewest parts that must leave `residency.keep` so that every GPU fits by the plain estimates.

    Engine parts leave first, as this costs no copy. Critic parts stay, as a critic uses separate GPUs.
    """
    droppable = (*ENGINE, *POLICY, *CRITIC[: has_critic(config)])
    parts = [part for part in droppable if part in kept(config.residency.keep)]

    def works(keep: list[str]) -> bool:
        other = replace(config, residency=replace(config.residency, keep=keep))
        return all(gpu.with_keep(keep).fits(strict=True) for gpu in gpus) and allowed(other)

    candidates = [part for part in parts if part not in CRITIC]
    for count in range(1, len(candidates) + 1):
        for dropped in combinations(candidates, count):
            if works(remaining := [part for part in parts if part not in dropped]):
                keep = f"residency.keep=[{','.join(remaining)}]"
                return f"without {dropped[0]} it fits: {keep}" if count == 1 else f"with {keep} it fits"
    return "whatever residency.keep may leave out, it does not fit at this fraction"


def describe_kinds(kinds: Mapping[str, int]) -> str:
    """Returns the kinds of memory of at least a tenth of a GiB with their GiB, as text: `weights 12.3, kv_cache 40.0`;
    "" if there are none."""
    return ", ".join(f"{kind} {_gib(size)}" for kind, size in kinds.items() if size >= GIB / 10)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
