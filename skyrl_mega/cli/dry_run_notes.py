"""Notes below the tables of a dry run: consequences of valid settings worth knowing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from skyrl_mega.config import allocator
from skyrl_mega.config.asynchrony_checks import MOST_SIMULATED
from skyrl_mega.config.derived import (
    cut_sampling,
    engine_data,
    expert_parallel,
    idle_gpus,
    open_at_once,
    response_limit,
)
from skyrl_mega.config.environment_places import beside_driver
from skyrl_mega.config.fp8_notes import fp8_notes
from skyrl_mega.config.schema import Config, DynamicSamplingConfig, PolicyConfig
from skyrl_mega.config.unread import unread_notes
from skyrl_mega.models import engine
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.published import hub_name
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic, engine_blocks, fit
from skyrl_mega.planner.batch import Batch, batch
from skyrl_mega.planner.host_memory import crowded
from skyrl_mega.planner.memory import GIB, gpu_bytes, on_cpu, policy_memory
from skyrl_mega.planner.moves import idle_moves
from skyrl_mega.planner.relief import Relief, policy_relief, relief, shortest
from skyrl_mega.planner.shared import stages
from skyrl_mega.planner.times import generate_time, step_time
from skyrl_mega.telemetry.trackers import registry


def notes(config: Config, d: Decoder, parallel: ParallelDims) -> list[str]:
    """Returns all notes, one line each."""
    made = batch(config, parallel)
    found = [cut_sampling(config), *unread_notes(config), *registry.unread_notes(config.telemetry)]
    found += [*_of_model(config), *crowded(config, d, parallel), *_of_batch(made), *_of_lengths(config)]
    found += [*_of_environments(config)]
    if not on_cpu(config):
        found += [
            dynamic.note(config),
            *_of_turns(config, d, parallel),
            *_of_policy(config, d, parallel),
            *_of_shared(config, d, parallel),
        ]
        found += _of_streaming(config, d, parallel)
        found += [*fp8_notes(config), *_of_blocks(config, d), *_of_engines(config, d, made)]
    return [note for note in found if note]


def _of_model(config: Config) -> Iterator[str]:
    if not Path(config.model.path).exists() and (name := hub_name(config.model.path)):
        yield f"the sizes are those of {name}"
    if config.cluster.device == "auto":
        yield "cluster.device=auto is planned as cuda"


def _of_environments(config: Config) -> Iterator[str]:
    environment, retriever = config.environment, config.environment.retriever
    own = not retriever.url and retriever.index is not None
    if environment.processes and config.cluster.nodes > 1 and beside_driver(environment):
        which = f"retriever.index = {retriever.index}" if own else f"retriever.url = {retriever.url}"
        yield (
            f"environment.{which}: that service answers on the driver's node alone, and so all "
            f"{environment.processes} of environment.processes are there; give environment.retriever.url the address "
            "of one that every node reaches, and they are spread"
        )
    if own and retriever.build is None and not Path(str(retriever.index)).exists():
        yield (
            f"environment.retriever.index = {retriever.index} is not here and was not checked; a run needs it, or "
            "environment.retriever.build, which makes it"
        )
    if config.asynchrony.mode == "full" and config.asynchrony.max_staleness > MOST_SIMULATED:
        yield (
            f"asynchrony.max_staleness={config.asynchrony.max_staleness}: up to {open_at_once(config):,} trajectories "
            f"may be open, and tokens so many steps old; --simulate finds what up to {MOST_SIMULATED} are worth"
        )
    without = replace(environment, slots=None)
    places, most = (
        config.rollout.engines * config.rollout.concurrency,
        open_at_once(replace(config, environment=without)),
    )
    if environment.slots is not None and environment.slots < min(places, most):
        yield (
            f"environment.slots = {environment.slots}: engines have places for up to {min(places, most):,} of the "
            "trajectories at once (rollout.concurrency), and wait for environments"
        )


def _of_batch(made: Batch) -> Iterator[str]:
    if made.oversize:
        yield (
            f"a sequence of up to {made.longest:,} tokens is above policy.micro_tokens × context = {made.budget:,}: it "
            "has a micro-batch of its own, and that sets the memory"
        )
    if made.trajectories < made.data * made.most:
        yield (
            f"an optimizer step has {made.trajectories} trajectories for {made.data} data-parallel ranks × {made.most} "
            "micro-batches: some have nothing to do"
        )


def _of_lengths(config: Config) -> Iterator[str]:
    """Yields notes on length limits never reached because of another limit."""
    rollout = config.rollout
    said, turns = rollout.sampling.max_tokens, rollout.max_turns
    if turns == 1 and said < response_limit(rollout):
        yield (
            f"rollout.sampling.max_tokens={said:,} ends an answer before rollout.max_response_tokens="
            f"{response_limit(rollout):,}, as there is one turn (rollout.max_turns): memory is planned for the longer, "
            "seconds for the shorter; give both the length that you want"
        )
    if rollout.max_length is not None and rollout.max_length < response_limit(rollout):
        yield (
            f"rollout.max_length={rollout.max_length:,} ends a sequence, prompt and answers, before "
            f"rollout.max_response_tokens={response_limit(rollout):,}"
        )


def _of_turns(config: Config, d: Decoder, parallel: ParallelDims) -> Iterator[str]:
    """Yields notes on needless offload, and on shared GPUs without offload."""
    keep = config.residency.keep
    if config.cluster.shared and keep is None:
        yield (
            "cluster.shared=true: policy and engines both stay in a GPU's memory all the time; residency.keep=[] has "
            "them take turns"
        )
    for move in idle_moves(config, d, parallel):
        have = "have GPUs of their" if len(move.who) > 1 or "engines" in move.who else "has GPUs of its"
        takes = f"{move.seconds:.2g} s a step" if move.seconds else "it is dropped and made again"
        yield (
            f"{' and '.join(move.who)} {have} own, which nothing shares, and what takes turns there by "
            f"residency.keep=[{','.join(keep or ())}] leaves them for nothing: {takes}; give "
            f"residency.keep={move.better}"
        )


def _of_streaming(config: Config, d: Decoder, parallel: ParallelDims) -> Iterator[str]:
    """Yields a note if the optimizer is streamed although everything fits without streaming."""
    optimizer = config.policy.optimizer
    if not optimizer.streamed:
        return
    without = replace(config, policy=replace(config.policy, optimizer=replace(optimizer, streamed=False)))
    if not fit.problems(without, d, strict=True) and shortest(without, d, parallel) is None:
        seconds = step_time(config, d, parallel).step - step_time(without, d, parallel).step
        yield (
            f"policy.optimizer.streamed=true takes {seconds:.2g} s a step, and all fits without it, too: leave it out, "
            "or use the room (policy.micro_tokens, policy.recompute)"
        )


def _of_policy(config: Config, d: Decoder, parallel: ParallelDims) -> Iterator[str]:
    if parallel.tensor > config.cluster.gpus_per_node:
        yield (
            f"policy.layout.tensor={parallel.tensor} is above cluster.gpus_per_node={config.cluster.gpus_per_node}: "
            "tensor parallel groups cross nodes, which is slow"
        )
    if not allocator.expandable(os.environ):
        yield (
            f"{' or '.join(allocator.VARIABLES)} is set here, without expandable_segments:True: a policy rank is "
            "counted with more memory that the allocator cannot give back"
        )
    gpu = gpu_bytes(config)
    usual = PolicyConfig().logit_chunk
    if config.policy.head == "auto" and config.policy.logit_chunk != usual:
        yield (
            f"policy.logit_chunk={config.policy.logit_chunk} is read on a CPU alone: policy.head=auto has no logits in "
            f"a GPU's memory, and so no chunks of them; policy.head=chunked has, or give policy.logit_chunk={usual}"
        )
    chunks = range(parallel.virtual_pipeline)
    layers = max(sum(len(parallel.stage_layers(d.layers, pp, c)) for c in chunks) for pp in range(parallel.pipeline))
    if config.policy.offload_layers > layers:
        yield f"policy.offload_layers={config.policy.offload_layers} is all of a rank's layers, {layers} at most"
    peaks = {pp: policy_memory(config, d, parallel, rank).peak for pp, rank in stages(parallel).items()}
    if tight := [pp for pp, peak in peaks.items() if peak > gpu]:
        yield (
            f"tight: by the estimates stage {', '.join(map(str, tight))} of the policy lacks "
            f"{(max(peaks.values()) - gpu) / GIB:.1f} GiB of a GPU, though within their margin; "
            f"{_helps(policy_relief(config, d, parallel))}"
        )


def _of_shared(config: Config, d: Decoder, parallel: ParallelDims) -> Iterator[str]:
    """Yields a note on the shared GPU's phase with the least free memory, if unsafe, with settings freeing memory."""
    short = shortest(config, d, parallel)
    if short is None:
        return
    helps = _helps(relief(config, d, parallel, short.phase))
    if short.left < 0:
        yield (
            f"tight: by the estimates a shared GPU lacks {-short.left / GIB:.1f} GiB in phase {short.phase}, though "
            f"within their margin; {helps}"
        )
    else:
        yield (
            f"close: {short.left / GIB:.2f} GiB of a shared GPU are left in phase {short.phase}, whose estimates may "
            f"be {short.doubt / GIB:.1f} too low; {helps}"
        )


def _helps(reliefs: list[Relief]) -> str:
    """Describes settings freeing memory, and the bytes freed. Only tried settings are named."""
    gives = ", ".join(f"{setting} ({gained / GIB:.1f} GiB)" for setting, gained in reliefs)
    return (
        f"what gives room there: {gives}" if gives else "no single setting gives room there; --suggest searches further"
    )


def _of_blocks(config: Config, d: Decoder) -> Iterator[str]:
    if (lacking := engine_blocks.other(config, d)) is None:
        return
    rollout, cut = config.rollout, engine_blocks.cut(config.rollout)
    better = {"rollout.tensor=": engine.whole_sizes(d, cut, online=True)}
    if not expert_parallel(rollout) and engine.cut_blocks(d, replace(cut, expert_parallel=True), online=True) is None:
        better["rollout.options.enable_expert_parallel=true with rollout.tensor="] = [rollout.tensor]
    gives = " or ".join(f"{key}{', '.join(map(str, sizes))}" for key, sizes in better.items() if sizes)
    yield (
        f"rollout.tensor={rollout.tensor} leaves {lacking} to a worker, no multiple of {engine.BLOCK}: engines "
        "quantise by blocks that begin at a worker's own columns, and have other numbers than policy and wire "
        "(mismatch/*); " + (f"they are the same with {gives}" if gives else "so it is with every size of this model")
    )


def _of_engines(config: Config, d: Decoder, made: Batch) -> Iterator[str]:
    rollout = config.rollout
    if idle := idle_gpus(config):
        yield idle
    if (data := engine_data(rollout)) > 1:
        yield (
            f"rollout.options.data_parallel_size={data} is planned alone: a run has none yet and refuses it; give as "
            "many more rollout.engines"
        )
    if 0 < d.kv_heads < rollout.tensor:
        yield (
            f"rollout.tensor={rollout.tensor} is above the model's {d.kv_heads} key/value heads: "
            f"{rollout.tensor // d.kv_heads} workers keep each (docs/recipes.md, Engines)"
        )
    unbounded = replace(config, environment=replace(config.environment, slots=None))  # all start at once
    unbounded = replace(unbounded, algorithm=replace(config.algorithm, dynamic_sampling=DynamicSamplingConfig()))
    limit, seconds = rollout.trajectory_timeout_s, generate_time(unbounded, d, made)
    if limit is not None and limit < seconds:
        yield (
            f"rollout.trajectory_timeout_s={limit:g} counts the time that a trajectory waits for an engine, and all of "
            f"them take about {seconds:.0f} s: those that come last are truncated"
        )
