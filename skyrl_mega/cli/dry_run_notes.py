"""Notes below the tables of a dry run: consequences of valid settings worth knowing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config import allocator
from skyrl_mega.config.checks.learning import MOST_SIMULATED
from skyrl_mega.config.checks.unused import unused_notes
from skyrl_mega.config.derived import (
    cutoff_note,
    engine_count,
    engine_data,
    engine_ranks,
    expert_parallel,
    idle_gpus_note,
    max_open_trajectories,
    on_driver_node,
    response_limit,
)
from skyrl_mega.config.drafts import draft_tokens
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.precision import fp8_notes
from skyrl_mega.config.schema import Config, DynamicSamplingConfig, PolicyConfig
from skyrl_mega.models import engine, megatron
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.published import hub_name
from skyrl_mega.models.quantization import BLOCK
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic, engine_blocks, fit
from skyrl_mega.planner.batch import StepSizes, batch
from skyrl_mega.planner.candidates import changed
from skyrl_mega.planner.engine_weights import kv_bytes_per_token
from skyrl_mega.planner.host_memory import numa_warnings
from skyrl_mega.planner.memory import GIB, gpu_bytes, itemsize, on_cpu, policy_memory
from skyrl_mega.planner.moves import needless_offloads
from skyrl_mega.planner.relief import Relief, least_safe_phase, relief
from skyrl_mega.planner.shared import stage_ranks
from skyrl_mega.planner.times import context_bytes, generate_time, step_time
from skyrl_mega.telemetry.trackers import registry


def notes(config: Config, decoder: Decoder, parallel: ParallelDims, signal: float = dynamic.SIGNAL_SHARE) -> list[str]:
    """Returns all notes of a dry run about the settings, one line each; [] if there is nothing to note. Changes
    nothing.

    Args:
        config: The settings, checked, and with `policy.micro_tokens` decided.
        decoder: The model.
        parallel: The policy's grid.
        signal: Share of groups with a signal, for dynamic sampling.
    """
    sizes = batch(config, parallel)
    lines = [cutoff_note(config), *unused_notes(config), *registry.unused_notes(config.telemetry)]
    lines += [*_on_model(config), *numa_warnings(config, decoder, parallel), *_on_batch(sizes), *_on_lengths(config)]
    lines += [*_on_environments(config), *_on_endpoints(config), *_on_drafts(config)]
    if not on_cpu(config):
        lines += [
            dynamic.note(config, signal),
            *_on_offload(config, decoder, parallel),
            *_on_policy(config, decoder, parallel),
            *_on_context(config, decoder, parallel, sizes),
            *_on_shared_gpus(config, decoder, parallel),
        ]
        lines += _on_streaming(config, decoder, parallel)
        lines += [*fp8_notes(config), *_on_fp8_blocks(config, decoder), *_on_engines(config, decoder, sizes)]
    return [note for note in lines if note]


def _on_model(config: Config) -> Iterator[str]:
    if not Path(config.model.path).exists() and (name := hub_name(config.model.path)):
        yield f"the sizes are those of {name}"
    if config.cluster.device == "auto":
        yield "cluster.device=auto is planned as cuda"


def _on_environments(config: Config) -> Iterator[str]:
    environment, retriever = config.environment, config.environment.retriever
    runs_service = not retriever.url and retriever.index is not None
    if environment.processes and config.cluster.nodes > 1 and on_driver_node(environment):
        which = f"retriever.index = {retriever.index}" if runs_service else f"retriever.url = {retriever.url}"
        yield (
            f"environment.{which}: this service answers only on the driver's node, so all {environment.processes} of "
            "environment.processes run there; to spread them over the nodes, give environment.retriever.url the "
            "address of a service that every node reaches"
        )
    if runs_service and retriever.build is None and not Path(str(retriever.index)).exists():
        yield (
            f"environment.retriever.index = {retriever.index} is not here and was not checked; a run needs it, or "
            "environment.retriever.build, which builds it"
        )
    if config.asynchrony.mode == "full" and config.asynchrony.max_staleness > MOST_SIMULATED:
        yield (
            f"asynchrony.max_staleness={config.asynchrony.max_staleness}: up to {max_open_trajectories(config):,} "
            f"trajectories may be open at once, and tokens may be so many syncs old when they are trained on; "
            f"--simulate compares values up to {MOST_SIMULATED}"
        )
    most = max_open_trajectories(changed(config, (("environment.slots", None),)))
    places = min(engine_count(config) * config.rollout.concurrency, most)
    if environment.slots is not None and environment.slots < places:
        yield (
            f"environment.slots = {environment.slots}: engines have places for up to {places:,} trajectories at once "
            "(rollout.concurrency), and wait for environments; give more slots to fill the engines"
        )


def _on_drafts(config: Config) -> Iterator[str]:
    """Yields a note about the assumed acceptance of draft tokens."""
    if drafts := draft_tokens(config.rollout):
        accepted = config.rollout.drafts.acceptance * drafts
        yield (
            f"rollout.drafts.acceptance={config.rollout.drafts.acceptance:g}: times assume {accepted:.2g} of {drafts} "
            "draft tokens accepted in a step; a run measures drafts/tokens_per_step (docs/drafts.md)"
        )


def _on_endpoints(config: Config) -> Iterator[str]:
    """Yields a note about the servers of `rollout.endpoints`, which no estimate of GPUs or memory includes."""
    servers = config.rollout.endpoints
    if servers:
        yield (
            f"rollout.endpoints: {len(servers)} of {engine_count(config)} engines are servers outside of the run: "
            "their GPUs and memory are not counted, and times assume that each is as fast as an engine of "
            f"rollout.tensor={config.rollout.tensor} on a GPU of cluster.rates; a run asks each server before the start"
        )


def _on_batch(sizes: StepSizes) -> Iterator[str]:
    if sizes.oversize:
        yield (
            f"a sequence of up to {sizes.longest:,} tokens is above policy.micro_tokens × context = {sizes.budget:,}: "
            "it gets a micro-batch of its own, which determines the memory"
        )
    if sizes.trajectories < sizes.data * sizes.most:
        yield (
            f"an optimizer step has {sizes.trajectories} trajectories for {sizes.data} data-parallel ranks × "
            f"{sizes.most} micro-batches: some ranks have nothing to do; give a larger data.mini_batch_prompts, or "
            "fewer ranks"
        )


def shared_prefixes_note(sizes: StepSizes, known: bool) -> str:
    """Returns a note with the share of tokens that `policy.share_prefixes` leaves out by the estimate.

    Args:
        sizes: Sizes of the step.
        known: True if the length of prompts is from a run, False if assumed.
    """
    shared = sizes.shared
    source = "as recorded" if known else "assumed from rollout.max_prompt_tokens; --like RUN takes a run's"
    prompts = f"prompts of {shared.prompt:,.0f} tokens ({source})"
    if shared.together == 1:
        return (
            f"policy.share_prefixes: sharing saves nothing here: with {prompts} and {sizes.mean:,.0f} tokens in all, "
            f"micro-batches of {sizes.budget:,} tokens take less time with whole sequences; give a larger "
            "policy.micro_tokens, or share_prefixes=false"
        )
    return (
        f"policy.share_prefixes: {shared.together} of {sizes.samples} samples of a prompt meet in a micro-batch and "
        f"leave out {shared.left_out / sizes.mean:.0%} of the step's tokens, for {prompts}"
    )


def _on_lengths(config: Config) -> Iterator[str]:
    """Yields notes on length limits never reached because of another limit."""
    rollout = config.rollout
    max_tokens, turns = rollout.sampling.max_tokens, rollout.max_turns
    if turns == 1 and max_tokens < response_limit(rollout):
        yield (
            f"rollout.sampling.max_tokens={max_tokens:,} ends an answer before rollout.max_response_tokens="
            f"{response_limit(rollout):,}, as there is one turn (rollout.max_turns): memory is planned for the longer, "
            "seconds for the shorter; give both the length that you want"
        )
    if rollout.max_length is not None and rollout.max_length < response_limit(rollout):
        yield (
            f"rollout.max_length={rollout.max_length:,} ends a sequence, prompt and answers, before "
            f"rollout.max_response_tokens={response_limit(rollout):,}"
        )


def _on_offload(config: Config, decoder: Decoder, parallel: ParallelDims) -> Iterator[str]:
    """Yields notes on needless offload, and on shared GPUs without offload."""
    keep = config.residency.keep
    if config.cluster.shared and keep is None:
        yield (
            "cluster.shared=true: policy and engines both stay in a GPU's memory all the time; with residency.keep=[] "
            "each is offloaded while the other works"
        )
    for offload in needless_offloads(config, decoder, parallel):
        phrase = "have GPUs of their" if len(offload.owners) > 1 or "engines" in offload.owners else "has GPUs of its"
        cost = f"{offload.seconds:.2g} s a step" if offload.seconds else "it is dropped and made again"
        yield (
            f"{' and '.join(offload.owners)} {phrase} own, so offloading there by "
            f"residency.keep=[{','.join(keep or ())}] is for nothing: {cost}; give residency.keep={offload.keep}"
        )


def _on_streaming(config: Config, decoder: Decoder, parallel: ParallelDims) -> Iterator[str]:
    """Yields a note if the optimizer is streamed although everything fits without streaming."""
    if not config.policy.optimizer.streamed:
        return
    without = changed(config, (("policy.optimizer.streamed", False),))
    if fit.problem(without, decoder, strict=True) is None and least_safe_phase(without, decoder, parallel) is None:
        seconds = step_time(config, decoder, parallel).step - step_time(without, decoder, parallel).step
        yield (
            f"policy.optimizer.streamed=true takes {seconds:.2g} s a step, and all fits without it, too: leave it out, "
            "or use the freed memory (policy.micro_tokens, policy.recompute)"
        )


def _on_policy(config: Config, decoder: Decoder, parallel: ParallelDims) -> Iterator[str]:
    if parallel.tensor > config.cluster.gpus_per_node:
        yield (
            f"policy.layout.tensor={parallel.tensor} is above cluster.gpus_per_node={config.cluster.gpus_per_node}: "
            "tensor parallel groups cross nodes, which is slow"
        )
    if not allocator.expandable(os.environ):
        yield (
            f"{' or '.join(allocator.VARIABLES)} is set here, without expandable_segments:True: the plan counts more "
            "memory of a policy rank as lost to fragmentation; add expandable_segments:True, or unset the variable"
        )
    gpu = gpu_bytes(config)
    usual = PolicyConfig().logit_chunk
    if config.policy.head == "auto" and config.policy.logit_chunk != usual:
        yield (
            f"policy.logit_chunk={config.policy.logit_chunk} is read on a CPU alone: policy.head=auto has no logits in "
            f"a GPU's memory, and so no chunks of them; policy.head=chunked has, or give policy.logit_chunk={usual}"
        )
    layers = max(parallel.stage_sizes(decoder.layers))
    if config.policy.offload_layers > layers:
        yield f"policy.offload_layers={config.policy.offload_layers} is all of a rank's layers, {layers} at most"
    peaks = {pp: policy_memory(config, decoder, parallel, rank).peak for pp, rank in stage_ranks(parallel).items()}
    if tight := [pp for pp, peak in peaks.items() if peak > gpu]:
        yield (
            f"tight: by the estimates stage {', '.join(map(str, tight))} of the policy lacks "
            f"{(max(peaks.values()) - gpu) / GIB:.1f} GiB of a GPU, though within their margin; "
            f"{_relief_text(relief(config, decoder, parallel))}"
        )


def _on_context(config: Config, decoder: Decoder, parallel: ParallelDims, sizes: StepSizes) -> Iterator[str]:
    """Yields a note with the bytes of both exchanges of context ranks, with context parallelism."""
    if parallel.context == 1:
        return
    texts = []
    for exchange in (parallel.context_exchange, "all_to_all" if parallel.context_exchange == "ring" else "ring"):
        layout = replace(parallel, context_exchange=exchange)
        mib = context_bytes(decoder, layout, itemsize(config)) * sizes.row.tokens / 2**20
        try:
            megatron.check(decoder, layout)
            texts.append(f"{mib:,.0f} MiB with {exchange}")
        except UserError:  # heads that the context ranks cannot split
            texts.append(f"{exchange} does not fit the heads")
    yield (
        f"policy.layout.context_exchange={parallel.context_exchange}: in a layer's forward pass of the longest "
        f"micro-batch a context rank receives {'; '.join(texts)} (docs/speed.md)"
    )


def _on_shared_gpus(config: Config, decoder: Decoder, parallel: ParallelDims) -> Iterator[str]:
    """Yields a note on the shared GPU's phase with the least free memory, if unsafe, with settings freeing memory."""
    unsafe = least_safe_phase(config, decoder, parallel)
    if unsafe is None:
        return
    hint = _relief_text(relief(config, decoder, parallel, unsafe.phase))
    if unsafe.free < 0:
        yield (
            f"tight: by the estimates a shared GPU lacks {-unsafe.free / GIB:.1f} GiB in phase {unsafe.phase}, though "
            f"within their margin; {hint}"
        )
    else:
        yield (
            f"close: {unsafe.free / GIB:.2f} GiB of a shared GPU are left in phase {unsafe.phase}, whose estimates may "
            f"be {unsafe.possible_shortage / GIB:.1f} GiB too low; {hint}"
        )


def _relief_text(reliefs: list[Relief]) -> str:
    """Describes settings freeing memory, and the bytes freed. Only tried settings are named."""
    options = ", ".join(f"{setting} ({gained / GIB:.1f} GiB)" for setting, gained in reliefs)
    return (
        f"settings that free memory there: {options}"
        if options
        else "no single setting frees memory there; --suggest searches further"
    )


def _on_fp8_blocks(config: Config, decoder: Decoder) -> Iterator[str]:
    if (part := engine_blocks.partial_block(config, decoder)) is None:
        return
    rollout, cut = config.rollout, EngineCut.of(config.rollout)
    fixes = {"rollout.tensor=": engine.whole_sizes(decoder, cut, online=True)}
    if (
        not expert_parallel(rollout)
        and engine.cut_blocks(decoder, replace(cut, expert_parallel=True), online=True) is None
    ):
        fixes["rollout.options.enable_expert_parallel=true with rollout.tensor="] = [rollout.tensor]
    options = " or ".join(f"{key}{', '.join(map(str, sizes))}" for key, sizes in fixes.items() if sizes)
    yield (
        f"rollout.tensor={rollout.tensor} leaves {part} to a worker, no multiple of {BLOCK}: engines "
        "quantise by blocks that begin at a worker's own columns, so their weights differ slightly from the policy's "
        "(mismatch/*); " + (f"they are equal with {options}" if options else "no other size avoids this for this model")
    )


def _on_engines(config: Config, decoder: Decoder, sizes: StepSizes) -> Iterator[str]:
    rollout = config.rollout
    if idle := idle_gpus_note(config):
        yield idle
    if engine_ranks(rollout) > (node := engine_cluster(config).gpus_per_node):
        data = f" rollout.options.data_parallel_size={engine_data(rollout)}" if engine_data(rollout) > 1 else ""
        yield (
            f"rollout.tensor={rollout.tensor}{data} works only in a plan: in a run, an engine must fit into a node of "
            f"{node} GPUs"
        )
    if 0 < decoder.kv_heads < rollout.tensor:
        yield (
            f"rollout.tensor={rollout.tensor} is above the model's {decoder.kv_heads} key/value heads: "
            f"{rollout.tensor // decoder.kv_heads} workers keep each (docs/recipes.md, Engines)"
        )
    if not decoder.kv_heads and rollout.tensor > 1 and kv_bytes_per_token(decoder, rollout.tensor, 1):
        yield (
            f"rollout.tensor={rollout.tensor}: each worker keeps the whole KV cache, because latent attention has one "
            "head in it; smaller engines hold more sequences (docs/recipes.md, Engines)"
        )
    # all start at once
    unbounded = changed(config, (("environment.slots", None), ("algorithm.dynamic_sampling", DynamicSamplingConfig())))
    limit, seconds = rollout.trajectory_timeout_s, generate_time(unbounded, decoder, sizes)
    if limit is not None and limit < seconds:
        yield (
            f"rollout.trajectory_timeout_s={limit:g} includes the wait for an engine, and the trajectories of a step "
            f"take about {seconds:.0f} s together: the last ones will be truncated; give more, or null"
        )
