"""Hardware utilization of a step: model FLOPs, and bytes read while decoding.

The peak rates are `cluster.rates.tflops` and `memory_gb_s`. A CPU's peak is unknown: there only absolute rates are
given, no shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from skyrl_mega.batch.samples import Samples
from skyrl_mega.config.derived import engine_count, engine_data, policy_ranks
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.flops import PassWork, causal_pairs, flops
from skyrl_mega.trajectories.trajectory import Kind, Trajectory

Steps = Mapping[int, int]
"""Tokens per iteration → number of iterations of an engine worker."""


def forward_load(mini: Samples, left_out: Tensor) -> PassWork:
    """Returns the work of a forward pass over a mini-batch: the real tokens, without padding.

    Args:
        mini: The mini-batch.
        left_out: int64 [S]: first tokens of each sample computed with another sample (`TrainGroup.left_out`).
    """
    elsewhere = PassWork.of(left_out[left_out > 0].tolist(), 0)
    return PassWork.of(mini.lengths.tolist(), float(mini.counts.sum())) + elsewhere * -1


def training_speed(
    config: Config, model: Decoder, loads: Mapping[str, PassWork], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Returns `perf/train_tflops_per_rank` and, on GPUs, `perf/mfu`, if the step trained; and on GPUs
    `perf/mfu_logprobs` if the step ran a log-prob pass; {} if the step did neither. The MFU is the share of
    `cluster.rates.tflops`, from 0 to 1.

    Args:
        config: The settings, with the device chosen.
        model: The model.
        loads: Work by phase, in forward passes; an optimizer step counts as three.
        seconds: Metrics of the step, with the seconds of each phase as `time/<phase>`.
    """
    metrics: dict[str, float] = {}
    for phase, name in (("train", "mfu"), ("logprobs", "mfu_logprobs")):
        load, time = loads.get(phase), seconds.get(f"time/{phase}", 0.0)
        if load is None or not time:
            continue
        rate = flops(model).forward(load) / time / policy_ranks(config)
        if phase == "train":
            metrics["perf/train_tflops_per_rank"] = rate / 1e12
        if config.cluster.device == "cuda":
            metrics[f"perf/{name}"] = rate / (config.cluster.rates.tflops * 1e12)
    return metrics


def decoding_speed(
    config: Config, model: Decoder, workers: Sequence[Steps], trajectories: Sequence[Trajectory], seconds: float
) -> dict[str, float]:
    """Returns the engines' metrics for the phase `generate`: `perf/decode_tokens_per_s_per_engine`; if iterations were
    counted also `perf/engine_steps`, the most iterations of a worker, and `perf/tokens_per_engine_step`, the mean over
    the iterations of all workers; then on GPUs also `perf/decode_bandwidth_share`, the share of the memory bandwidth,
    from 0 to 1.

    Args:
        config: The settings, with the device chosen.
        model: The model.
        workers: Iterations of each worker of every engine.
        trajectories: The generated trajectories.
        seconds: Duration of the phase, above 0.
    """
    written, attended = tokens_and_attention(trajectories)
    metrics = {"perf/decode_tokens_per_s_per_engine": written / seconds / engine_count(config)}
    count = sum(sum(steps.values()) for steps in workers)
    if not count:
        return metrics
    metrics["perf/engine_steps"] = max(float(sum(steps.values())) for steps in workers)
    metrics["perf/tokens_per_engine_step"] = sum(n * times for steps in workers for n, times in steps.items()) / count
    if config.cluster.device == "cuda":
        reading, replicas = reads(config, model), engine_data(config.rollout)
        weights = sum(times * reading.weights(n * replicas) for steps in workers for n, times in steps.items())
        cache = (attended * reading.per_token + written * reading.per_sequence) / (engine_count(config) * replicas)
        rate = (weights / len(workers) + cache) / seconds
        metrics["perf/decode_bandwidth_share"] = rate / (engine_cluster(config).rates.memory_gb_s * 1e9)
    return metrics


def tokens_and_attention(trajectories: Sequence[Trajectory]) -> tuple[float, float]:
    """Returns the number of the policy's tokens, and a measure of the work of attention: the sum, over these tokens, of
    the number of earlier tokens in the same conversation."""
    written, attended = 0, 0.0
    for t in trajectories:
        prompt_start = 0
        for step in t.steps:
            if step.kind is Kind.PROMPT:
                prompt_start = step.start
            elif step.kind is Kind.RESPONSE:
                count, context = step.end - step.start, step.start - prompt_start
                written += count
                attended += count * context + causal_pairs(count - 1)
    return float(written), attended
