"""Tests of log-probs, loss and gradients against transformers, an independent implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_mega.config.schema import BuildConfig, MoeConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.megatron.layouts import policy_logprobs
from tests.support.ranks import run_ranks


def expected_logprobs(path: Path, batch: Sequences) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    out = []
    with torch.no_grad():
        for start, length in zip(batch.starts, batch.lengths, strict=True):
            tokens = batch.tokens[start : start + length].long()
            logp = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
            out += [0.0, *logp[:-1].gather(1, tokens[1:, None])[:, 0].tolist()]
    return np.array(out)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3", "qwen2", "llama"])
def test_log_probs_of_each_architecture(tmp_path: Path, name: str, tied: bool) -> None:
    build(BuildConfig(architecture=name, head_dim=16, tied=tied), tmp_path / "m", seed=2)
    batch = layouts.some_batch(100, seed=5)
    # A deviation of 0.02 makes all distributions nearly uniform and hides faults. A larger scale shows faults.
    widen(tmp_path / "m")
    expected = expected_logprobs(tmp_path / "m", batch)
    assert expected.std() > 0.5
    np.testing.assert_allclose(policy_logprobs(tmp_path / "m", batch), expected, atol=1e-4)


def test_log_probs_of_a_sharded_moe(tmp_path: Path) -> None:
    build(BuildConfig(layers=4), tmp_path / "m", seed=3)
    widen(tmp_path / "m")
    batch = layouts.some_batch(100, seed=6)
    actual = policy_logprobs(tmp_path / "m", batch, ranks=4, tensor=2, pipeline=2, virtual_pipeline=2, expert=2)
    np.testing.assert_allclose(actual, expected_logprobs(tmp_path / "m", batch), atol=1e-4)


def widen(path: Path) -> None:
    """Makes the matrices large and the norms and biases uneven. So every parameter affects the log-probs."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(9)
    tensors = load_file(path / "model.safetensors")
    for t in tensors.values():
        if t.dim() == 1:
            t += torch.randn(t.shape, generator=generator) * 0.3
        else:
            t *= 6.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_log_probs_of_a_trained_model(stories: Path) -> None:
    rng = np.random.default_rng(0)
    batch = Sequences.of([[1, *rng.integers(3, 512, n).tolist()] for n in (5, 80, 200)])
    np.testing.assert_allclose(policy_logprobs(stories, batch), expected_logprobs(stories, batch), atol=1e-4)


@pytest.mark.slow
@pytest.mark.nightly
def test_log_probs_of_smollm2(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ["The capital of France is Paris, and", "def f(x):\n    return x + 1\n", "1 + 1 = 2"]
    batch = Sequences.of([tokenizer.encode(t) for t in texts])
    np.testing.assert_allclose(policy_logprobs(smollm2, batch), expected_logprobs(smollm2, batch), atol=1e-4)


def test_the_balance_of_experts(tmp_path: Path) -> None:
    """Compares the gradient norm and the metric of a step with the load-balancing loss, computed from its equations by
    autograd."""
    build(BuildConfig(layers=2), tmp_path / "m", seed=4)
    widen(tmp_path / "m")
    batch, coefficient = layouts.some_batch(100, seed=7), 0.3
    moe = MoeConfig(aux_loss=coefficient)
    [(metrics,)] = run_ranks(
        1, layouts.train, tmp_path / "m", layouts.layout(1), layouts.policy_config(moe=moe), batch, 1
    )

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None  # the padding row would get no gradient
    experts, chosen_of_token = model.config.num_experts, model.config.num_experts_per_tok
    loss, scores = torch.zeros(()), []
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        tokens = batch.tokens[start : start + length].long()
        out = model(tokens[None], output_router_logits=True)
        logp = torch.log_softmax(out.logits[0], -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        loss = loss - (batch["weights"][start + 1 : start + length] * logp).sum()
        scores.append([layer.softmax(-1) for layer in out.router_logits])
    of_policy, balances = loss.item(), []
    for layer in zip(*scores, strict=True):
        probabilities = torch.cat(layer)
        choices = probabilities.topk(chosen_of_token).indices.flatten()
        share = torch.bincount(choices, minlength=experts) / len(choices)
        balances.append(experts * (share * probabilities.mean(0)).sum())
    (loss + coefficient * sum(balances)).backward()
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
    assert metrics["loss"] == pytest.approx(of_policy, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["expert_balance"] == pytest.approx(torch.stack(balances).mean().item(), rel=1e-5)
