"""Hardware utilization of a step: model FLOPs, and bytes read while decoding.

The peak rates are `cluster.rates.tflops` and `memory_gb_s`. A CPU's peak is unknown: there only absolute rates are
given, no shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl_mega.config.derived import engine_data, policy_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.flops import Load, causal_pairs, flops
from skyrl_mega.rollout.trajectory import Kind, Trajectory

Steps = Mapping[int, int]
"""Tokens per iteration → number of iterations of an engine worker."""


def load_of(mini: Sequences) -> Load:
    """Returns the work of a forward pass over a mini-batch: the real tokens, without padding."""
    asked = mini["weights"] != 0
    if "mask" in mini:
        asked = asked & (mini["mask"] != 0)
    return Load.of(mini.lengths.tolist(), float(asked.sum()))


def of_training(
    config: Config, d: Decoder, loads: Mapping[str, Load], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Returns `perf/mfu`, and `perf/mfu_logprobs` if the step ran a log-prob pass.

    Args:
        config: The settings, with the device chosen.
        d: The model.
        loads: Work by phase, in forward passes; an optimizer step counts as three.
        seconds: `time/<phase>`.
    """
    found: dict[str, float] = {}
    for phase, name in (("train", "mfu"), ("logprobs", "mfu_logprobs")):
        load, time = loads.get(phase), seconds.get(f"time/{phase}", 0.0)
        if load is None or not time:
            continue
        rate = flops(d).forward(load) / time / policy_ranks(config)
        if phase == "train":
            found["perf/train_tflops_per_rank"] = rate / 1e12
        if config.cluster.device == "cuda":
            found[f"perf/{name}"] = rate / (config.cluster.rates.tflops * 1e12)
    return found


def of_decoding(
    config: Config, d: Decoder, workers: Sequence[Steps], played: Sequence[Trajectory], seconds: float
) -> dict[str, float]:
    """Returns the engines' metrics for the phase `generate`.

    Args:
        config: The settings, with the device chosen.
        d: The model.
        workers: Iterations of each worker of every engine.
        played: The generated trajectories.
        seconds: Duration of the phase.
    """
    written, attended = responses(played)
    found = {"perf/decode_tokens_per_s_per_engine": written / seconds / config.rollout.engines}
    count = sum(sum(steps.values()) for steps in workers)
    if not count:
        return found
    found["perf/engine_steps"] = max(float(sum(steps.values())) for steps in workers)
    found["perf/tokens_per_engine_step"] = sum(n * times for steps in workers for n, times in steps.items()) / count
    if config.cluster.device == "cuda":
        reading, replicas = reads(config, d), engine_data(config.rollout)
        weights = sum(times * reading.weights(n * replicas) for steps in workers for n, times in steps.items())
        cache = attended / (config.rollout.engines * replicas) * reading.per_token
        rate = (weights / len(workers) + cache) / seconds
        found["perf/decode_bandwidth_share"] = rate / (config.cluster.rates.memory_gb_s * 1e9)
    return found


def responses(played: Sequence[Trajectory]) -> tuple[float, float]:
    """Returns the number of tokens written by engines, and the total number of tokens read by attention for these."""
    written, attended = 0, 0.0
    for t in played:
        begin = 0
        for step in t.steps:
            if step.kind is Kind.PROMPT:
                begin = step.start
            elif step.kind is Kind.RESPONSE:
                n, before = step.end - step.start, step.start - begin
                written += n
                attended += n * before + causal_pairs(n - 1)
    return float(written), attended
