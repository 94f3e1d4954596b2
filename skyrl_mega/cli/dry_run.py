"""`--dry-run`: everything derived from the settings and the model's sizes, as plain values. Starts nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

from skyrl_mega.cli import dry_run_notes, dry_run_time, inputs, layout_checks, workload
from skyrl_mega.cli.planned_containers import container_notes, planned_containers
from skyrl_mega.cli.refusal import with_fix
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import masked
from skyrl_mega.config.checks import check
from skyrl_mega.config.derived import engine_count, generates_ahead, length_limit, max_open_trajectories
from skyrl_mega.config.pools import engine_view
from skyrl_mega.config.sandboxes import evaluation_trajectories
from skyrl_mega.config.schema import Config
from skyrl_mega.models import huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic, fit, layout_text, micro_tokens, rates
from skyrl_mega.planner.batch import StepSizes, batch
from skyrl_mega.planner.engine_weights import prefix_caching, state_bytes, states
from skyrl_mega.planner.flops import flops
from skyrl_mega.planner.host_memory import disk, host_memory, shares
from skyrl_mega.planner.memory import (
    critic_dims,
    critic_memory,
    engine_memory,
    gpu_bytes,
    itemsize,
    on_cpu,
    policy_memory,
    reference_memory,
)
from skyrl_mega.planner.placement import PlannedNode, nodes
from skyrl_mega.planner.processes import COUNTED, MARGIN, SHOWN, PolicyMemory
from skyrl_mega.planner.shared import fullest, shared_gpus
from skyrl_mega.planner.times import mean_concurrency
from skyrl_mega.planner.trajectories import sizes_of
from skyrl_mega.weights.files.cost import file_bytes, file_lines
from skyrl_mega.weights.members import FILES
from skyrl_mega.weights.plan import report
from skyrl_mega.weights.plan.cost import cost, host_time
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.sync_plan import sync_plan, wire_text


def checked(config: Config, say: Callable[[str], None] = lambda line: None) -> tuple[Mapping[str, Any], list[str]]:
    """Checks settings and inputs of a dry run; returns the model's config.json (of a published model if `model.path` is
    absent), and the paths absent from this machine.

    Args:
        config: The settings.
        say: Called with messages about data rows in which no answer earns a reward, and tensors that nothing reads.

    Raises:
        UserError: An input is invalid, or the run does not fit; the message is one line, with the nearest working
            settings if any (a search of seconds).
    """
    if not config.model.path:
        check(config, planned=True)
    hf, absent = inputs.planned_inputs(config, say)
    try:
        check(config, planned=True)
        layout_checks.check_layouts(config, hf)
        fit.check(micro_tokens.with_micro_tokens(config, hf), hf)
    except UserError as error:
        raise with_fix(error, config, hf, planned=True) from error
    return hf, absent


def values(
    config: Config,
    hf: Mapping[str, Any],
    absent: Sequence[str] = (),
    data_notes: Sequence[str] = (),
    args: argparse.Namespace | None = None,
) -> dict[str, Any]:
    """Returns the content of `--dry-run --json`: placement, memory in bytes, sync, times in seconds and notes, by name.

    None: `sync` and `gpu_memory` on a CPU; `seconds` and `time` on a CPU without measured rates (`cluster.rates_file`);
    `containers` without any. Secrets are masked in `config`, but not in texts such as notes.

    Args:
        config: The settings, accepted by `checked`.
        hf: The model's config.json.
        absent: Paths absent from this machine; returned under `absent`.
        data_notes: Notes of the data check; returned first under `notes`.
        args: Options that describe the trajectories (`cli.workload`), refused without rates; None without options.

    Raises:
        UserError: The planned sync exceeds `weights.timeout_s`, or an option or the file of rates is wrong.
    """
    decoder, original = architecture(hf).describe(hf), config
    with_tokens = micro_tokens.with_micro_tokens(config, hf)
    config, all_rates = rates.with_measured(with_tokens)
    parallel, reference = fit.parallel_of(config)
    critic = critic_dims(config)
    plan, sync = _planned_sync(config, hf)
    seconds, times = _times(dry_run_time.Inputs(config, all_rates, decoder, parallel, sync), args)
    signal = times["trajectories"]["signal_share"] if times else dynamic.SIGNAL_SHARE
    sizes = batch(config, parallel)
    placed = nodes(config)
    hosts = _nodes(config, decoder, parallel, reference, placed)
    return {
        "config": masked(asdict(with_tokens)),
        "model": _model(config, decoder),
        "policy": _ranks(config, decoder, parallel, policy_memory),
        "reference": _ranks(config, decoder, reference, reference_memory) if reference else [],
        "critic": _ranks(config, decoder, critic, critic_memory) if critic else [],
        "engines": _engines(config, decoder, sizes),
        "shared": _shared(config, decoder, parallel),
        "nodes": hosts,
        "batch": _batch(config, sizes),
        "containers": asdict(containers) if (containers := planned_containers(config)) else None,
        "gpu_memory": None if on_cpu(config) else gpu_bytes(config),
        "margin": MARGIN,
        "counted": COUNTED,
        "disk": {**asdict(disk(config, decoder)), "largest_share": asdict(shares(config, decoder, parallel, placed))},
        "plan": report.identity(plan, wire_text(config)),
        "sync": None if on_cpu(config) else sync,
        "seconds": seconds,
        "time": times,
        "notes": [
            *data_notes,
            *filter(None, [micro_tokens.note(original, config, decoder)]),
            *_setting_notes(config, decoder, parallel, signal, args),
            *container_notes(config, [host["host_memory_total"] for host in hosts]),
        ],
        "absent": list(absent),
    }


def _setting_notes(
    config: Config, decoder: Decoder, parallel: ParallelDims, signal: float, args: argparse.Namespace | None
) -> list[str]:
    """Returns the notes on settings, `policy.share_prefixes` for the trajectories that the options describe."""
    notes = dry_run_notes.notes(config, decoder, parallel, signal)
    if config.policy.share_prefixes:
        played = workload.described(config, parallel, args).trajectories
        _, sizes = sizes_of(config, parallel, played)
        notes.append(dry_run_notes.shared_prefixes_note(sizes, played.prompt is not None))
    return notes


def _nodes(
    config: Config,
    decoder: Decoder,
    parallel: ParallelDims,
    reference: ParallelDims | None,
    placed: Sequence[PlannedNode],
) -> list[dict[str, Any]]:
    """Returns a row for each node: ranks, engines and host memory."""
    rows = []
    for i, node in enumerate(placed):
        memory = host_memory(config, decoder, parallel, reference, node, first=i == 0)
        rows.append({**asdict(node), "host_memory": asdict(memory), "host_memory_total": memory.total})
    return rows


def _batch(config: Config, sizes: StepSizes) -> dict[str, Any]:
    return {
        **asdict(sizes),
        "sequences": sizes.sequences,
        "oversize": sizes.oversize,
        "open": max_open_trajectories(config, evaluation_trajectories(config)),
        "ahead": config.asynchrony.max_staleness if generates_ahead(config.asynchrony) else 0,
        "mode": config.asynchrony.mode,
    }


def _model(config: Config, decoder: Decoder) -> dict[str, Any]:
    return {
        "path": config.model.path,
        "dtype": config.model.dtype,
        "parameters": sum(map(prod, huggingface.tensors(decoder).values())),
        "active": int(flops(decoder).matrices / 2),
        "layers": decoder.layers,
        **{name: decoder.facts.get(name, 0) for name in ("heads", "kv_heads", "experts", "experts_per_token")},
        "bytes": sum(map(prod, huggingface.tensors(decoder).values())) * itemsize(config),
    }


def _ranks(config: Config, decoder: Decoder, parallel: ParallelDims, measure: Any) -> list[dict[str, Any]]:
    """Returns a row for each rank: placement, layers and memory."""
    return [
        {**row, "memory": _kinds(measure(config, decoder, parallel, row["rank"]))}
        for row in layout_text.policy_rows(parallel, decoder)
    ]


def _kinds(memory: PolicyMemory) -> dict[str, Any]:
    return {
        "weights": memory.state.weights,
        "gradients": memory.state.gradients,
        "optimizer": memory.state.optimizer,
        "activations": memory.activations.train,
        "logits": memory.activations.train_logits,
        "forward": memory.activations.forward + memory.activations.forward_logits,
        "reference": memory.reference,
        "sync": memory.sync,
        "reserve": memory.reserve,
        "gaps": memory.gaps,
        "phase": memory.busiest,
        "peak": memory.peak,
        "least": memory.lower_bound,
        "parked": memory.pinned,
        "phases": {phase: memory.phase(phase) for phase in memory.phases},
    }


def _engines(config: Config, decoder: Decoder, sizes: StepSizes) -> dict[str, Any]:
    """Returns the values of one engine; all engines are alike."""
    rows, memories = [], []
    for row in layout_text.worker_rows(config, decoder):
        m = engine_memory(config, decoder, row["worker"])
        memories.append(m)
        kinds = {
            **asdict(m),
            "kv": m.kv,
            "tokens": m.tokens,
            "peak": m.peak,
            "phases": {name: m.phase(name) for name in SHOWN["policy"]},
        }
        rows.append({**row, "memory": {name: kinds[name] for name in kinds if name != "cpu_kv_cache"}})
    fullest = min(memories, key=lambda m: m.tokens)
    usual = mean_concurrency(config, fullest, sizes)
    return {
        "count": config.rollout.engines,
        "servers": len(config.rollout.endpoints),
        "tensor": config.rollout.tensor,
        "workers": rows,
        "gpu_memory": None if on_cpu(config) else gpu_bytes(engine_view(config)),
        "concurrency": config.rollout.concurrency,
        "at_once": min(config.rollout.concurrency, fullest.tokens // length_limit(config.rollout)),
        "usual": usual,
        "waiting": max(0, -(-sizes.sequences // engine_count(config)) - usual),
        "state": state_bytes(config, decoder),
        "states": states(config),
        "cached_prefixes": prefix_caching(config),
    }


def _shared(config: Config, decoder: Decoder, parallel: ParallelDims) -> dict[str, Any] | None:
    """Returns the memory of the fullest shared GPU for each phase; None if no GPU is shared."""
    gpus = [*shared_gpus(config, decoder, parallel)]
    if not gpus:
        return None
    by_phase = {name: fullest(gpus, name) for name in gpus[0].policy.phases}
    worst = min(by_phase, key=lambda name: by_phase[name].free(name))
    state, policy, beside = by_phase[worst].policy.state, by_phase[worst].policy, by_phase[worst].engine.beside
    return {
        "ranks": {name: gpu.rank for name, gpu in by_phase.items()},
        "keep": config.residency.keep,
        "parts": {
            name: {"policy": gpu.policy.phase(name), "engine": gpu.engine.phase(name)} for name, gpu in by_phase.items()
        },
        "policy": {name: gpu.policy.totals[name] for name, gpu in by_phase.items()},
        "engine": {name: gpu.engine.totals[name] - beside for name, gpu in by_phase.items()},
        "beside": beside,
        "left": {name: gpu.free(name) for name, gpu in by_phase.items()},
        "margin": by_phase[worst].free(worst),
        "phase": worst,
        "idle": sum(
            getattr(state, kind) for kind in ("gradients", "optimizer") if policy.is_resident(kind, "generate")
        ),
    }


def _times(
    inputs: dry_run_time.Inputs, args: argparse.Namespace | None
) -> tuple[dict[str, float] | None, dict[str, Any] | None]:
    """Returns the seconds of a step and everything about time; None for both without rates.

    Raises:
        UserError: An option describes trajectories, but no rates are known.
    """
    if rates.has_times(inputs.config):
        return dry_run_time.values(inputs, args)
    if option := workload.first_option(args):
        raise UserError(
            "no rates of a CPU are known, so no seconds are estimated",
            key=f"--{option}",
            fix="give cluster.rates_file=FILE, a file of python -m benchmarks.bet --rates FILE",
        )
    return None, None


def _planned_sync(config: Config, hf: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Returns the transfer plan of a weight sync, and the plan's cost.

    Raises:
        UserError: On GPUs, the sync exceeds `weights.timeout_s`.
    """
    start = time.process_time()
    # Without engines of the run, one stands for the servers of rollout.endpoints, whose layout is unknown.
    plan = sync_plan(replace(config, rollout=replace(config.rollout, engines=max(1, config.rollout.engines))), hf)
    sync = _sync(config, plan, time.process_time() - start)
    if config.weights.transport == FILES:
        sync["files"] = file_lines(file_bytes(config, hf), config)
    elif not on_cpu(config):
        fit.check_sync(config, sync["predicted_seconds"])
    return plan, sync


def _sync(config: Config, plan: Plan, seconds: float) -> dict[str, Any]:
    """Returns the cost of a transfer plan; `seconds` is the time spent on planning."""
    host = host_time(plan, int(config.weights.bucket_mib * 2**20))
    return report.values(plan, cost(plan), host, seconds, wire_text(config))
