"""Hardware use of a step, computed by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_mega.config.schema import Config
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.flops import PassWork, causal_pairs, flops
from skyrl_mega.trainer.speed import decoding_speed, forward_load, tokens_and_attention, training_speed
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, TrajectoryStep
from tests.support.batches import samples_of_tokens
from tests.weights.grids import MODELS

HF = MODELS["qwen3"]
MODEL = architecture(HF).describe(HF)


def config(device: str = "cuda", **rates: float) -> Config:
    settings = Config()
    settings.cluster.device, settings.policy.ranks = device, 4
    for name, rate in rates.items():
        setattr(settings.cluster.rates, name, rate)
    return settings


def parameters(hf: dict[str, Any]) -> int:
    """Returns the elements of all layers' matrices, by the model's published arithmetic."""
    h, f, n, kv, size = (
        hf[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    return int(hf["num_hidden_layers"] * (2 * h * n * size + 2 * h * kv * size + 3 * h * f))


def test_mfu_is_six_operations_for_every_parameter_and_attention() -> None:
    """Computes MFU as in Kaplan et al. (arXiv:2001.08361), with attention counted by actual pairs."""
    lengths, asked = [7, 3], 5
    pairs = (1 + 2 + 3 + 4 + 5 + 6 + 7) + (1 + 2 + 3)
    attention = HF["num_hidden_layers"] * 4 * HF["num_attention_heads"] * HF["head_dim"] * pairs
    head = 2 * HF["hidden_size"] * HF["vocab_size"] * asked
    forward = 2 * parameters(HF) * 10 + attention + head
    loads = {"train": PassWork.of(lengths, asked) * 3, "logprobs": PassWork.of(lengths, asked)}
    seconds = {"time/train": 2.0, "time/logprobs": 0.5}
    figures = training_speed(config(tflops=0.001), MODEL, loads, seconds)
    assert figures["perf/mfu"] == pytest.approx(3 * forward / 2.0 / 4 / 1e9)
    assert figures["perf/mfu_logprobs"] == pytest.approx(forward / 0.5 / 4 / 1e9)
    assert figures["perf/train_tflops_per_rank"] == pytest.approx(figures["perf/mfu"] * 0.001)


def test_a_cpus_peak_is_not_known() -> None:
    loads = {"train": PassWork.of([7], 3), "logprobs": PassWork.of([7], 3)}
    figures = training_speed(config("cpu"), MODEL, loads, {"time/train": 1.0, "time/logprobs": 1.0})
    assert [*figures] == ["perf/train_tflops_per_rank"]
    assert training_speed(config(), MODEL, {}, {"time/train": 1.0}) == {}, "a step that trains nothing"
    decoding = decoding_speed(config("cpu"), MODEL, [{4: 10}], [trajectory()], 1.0)
    assert "perf/decode_bandwidth_share" not in decoding and decoding["perf/engine_steps"] == 10


def test_a_pass_is_on_real_tokens_and_asked_for_those_that_count() -> None:
    mini = samples_of_tokens([[1] * 4, [2] * 3])
    mini.counts = torch.tensor([2, 2])
    assert forward_load(mini, torch.tensor([0, 0])) == PassWork({4: 1, 3: 1}, 4)
    shared = forward_load(mini, torch.tensor([0, 2]))
    assert shared.tokens == 5 and shared.logprob_tokens == 4
    # The third token of the second sequence attends to three tokens.
    per_token = replace(flops(MODEL), layers=0.0, head=0.0, attention=1.0, windows=())
    assert per_token.forward(shared) == causal_pairs(4) + 3


def trajectory() -> Trajectory:
    """Returns a trajectory: prompt of 4, answer of 3, observation of 2, answer of 2; new prompt of 2, answer of 1."""
    kinds = [
        *((Kind.PROMPT, 0, 4), (Kind.RESPONSE, 4, 7), (Kind.OBSERVATION, 7, 9), (Kind.RESPONSE, 9, 11)),
        *((Kind.PROMPT, 11, 13), (Kind.RESPONSE, 13, 14)),
    ]
    parts = array("i", [0] * 14), array("b", [0] * 14), array("f", [0.0] * 14)
    steps = [TrajectoryStep(*kind) for kind in kinds]
    return Trajectory(Prompt(0, [], "mine", {}), 0, *parts, 4, 0.0, Status.COMPLETED, 3, steps=steps)


def test_a_token_attends_to_those_before_it_since_the_last_prompt() -> None:
    assert tokens_and_attention([trajectory()]) == (6.0, (4 + 5 + 6) + (9 + 10) + 2)


def test_decoding_reads_all_weights_in_every_step_and_the_cache_of_every_token() -> None:
    settings = config(memory_gb_s=0.001)
    settings.rollout.engines, settings.model.dtype = 2, "float32"
    workers = [{3: 10, 2: 5}, {1: 20}]
    figures = decoding_speed(settings, MODEL, workers, [trajectory()], seconds=4.0)
    assert figures["perf/decode_tokens_per_s_per_engine"] == 6 / 4.0 / 2
    assert figures["perf/engine_steps"] == 20 and figures["perf/tokens_per_engine_step"] == (30 + 10 + 20) / 35
    embedding = HF["vocab_size"] * HF["hidden_size"]
    cache = 2 * HF["num_hidden_layers"] * HF["num_key_value_heads"] * HF["head_dim"] * 4
    reading = reads(settings, MODEL)
    assert reading.per_token == cache
    assert reading.plain == pytest.approx(4 * (parameters(HF) + 2 * embedding), rel=0.03), "norms and padding"
    share = ((15 + 20) / 2 * reading.plain + 36 / 2 * cache) / 4.0 / 1e6
    assert figures["perf/decode_bandwidth_share"] == pytest.approx(share)


def test_a_step_reads_the_experts_that_some_token_of_it_chose() -> None:
    hf = MODELS["qwen3_moe_mixed"]
    reading = reads(config(), architecture(hf).describe(hf))
    sparse = sum(size for size, _ in reading.sparse)
    part = hf["num_experts_per_tok"] / hf["num_experts"]
    assert sparse > 0 and reading.weights(1) == pytest.approx(reading.plain + part * sparse)
    assert reading.weights(1) < reading.weights(2) < reading.weights(10_000) == pytest.approx(reading.plain + sparse)
