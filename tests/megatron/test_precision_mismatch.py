"""Test of the mismatch with FP8 engines: smaller for an FP8 policy than for another precision, by equal numbers and
blocks.

The engine is transformers' model with the products of a W8A8 engine: weights in 128 × 128 blocks, activations in 1 ×
128 as vLLM quantises them (`per_token_group_quant_fp8`), in separate plain torch code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from skyrl_mega.config.schema import BuildConfig, PolicyConfig, PrecisionConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.megatron.test_against_transformers import widen
from tests.support.ranks import run_ranks
from tests.weights.test_fp8_wire import whole_tensors

LARGEST = 448.0


class Fp8Products(TorchFunctionMode):
    """Mode with E4M3 products in linear layers, except for `kept` weights.

    Args:
        kept: Addresses of weights.
    """

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self.kept = kept
        self.weights: dict[int, Tensor] = {}
        self.products = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or args[1].data_ptr() in self.kept:
            return func(*args, **(kwargs or {}))
        self.products += 1
        x, weight, *bias = args
        if (key := weight.data_ptr()) not in self.weights:
            numbers, scales = whole_tensors({"w": weight.detach()}, frozenset({"w"}))
            scale = scales["w_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            self.weights[key] = numbers["w"].float() * scale[: weight.shape[0], : weight.shape[1]]
        return func(self.by_groups(x), self.weights[key], *bias, **(kwargs or {}))

    def by_groups(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for start in range(0, x.shape[-1], 128):
            group = x[..., start : start + 128]
            scale = group.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
            numbers = (group / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            out[..., start : start + 128] = numbers.float() * scale
        return out


@contextmanager
def engine(path: Path) -> Iterator[Any]:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    kept = {
        p.data_ptr() for name, p in model.named_parameters() if name.endswith("mlp.gate.weight") or "lm_head" in name
    }
    kept.add(model.get_output_embeddings().weight.data_ptr())
    with torch.no_grad(), Fp8Products(kept) as mode:
        yield model
    assert mode.products


def engine_logprobs(path: Path, batch: Sequences) -> np.ndarray:
    out = []
    with engine(path) as model:
        for start, length in zip(batch.starts, batch.lengths, strict=True):
            tokens = batch.tokens[start : start + length].long()
            logp = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
            out += [0.0, *logp[:-1].gather(1, tokens[1:, None])[:, 0].tolist()]
    return np.array(out)


def policy_logprobs(path: Path, batch: Sequences, recipe: str) -> np.ndarray:
    policy: PolicyConfig = layouts.policy_config(micro_tokens=400, precision=PrecisionConfig(recipe))
    (answer,) = run_ranks(1, layouts.logprobs, path, layouts.layout(1), policy, batch)
    values_T = np.full(len(batch.tokens), np.nan)
    for rows, (values, _) in answer:
        values_T[batch.index(rows).numpy()] = values
    return values_T


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "m"
    build(BuildConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=128, experts=4, expert_ffn=256), path, seed=2)
    widen(path)
    return path


@pytest.mark.parametrize("model", ["wide", "stories"])
def test_an_fp8_policy_has_at_most_half_the_mismatch(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    rng = np.random.default_rng(0)
    batch = Sequences.of([[1, *rng.integers(3, 100, n).tolist()] for n in (5, 80, 200)])
    served = engine_logprobs(path, batch)
    plain, fp8 = (policy_logprobs(path, batch, recipe) for recipe in ("model", "fp8_blockwise"))
    between = {name: float(np.abs(trained - served).mean()) for name, trained in (("model", plain), ("fp8", fp8))}
    assert between["model"] > 1e-3
    assert between["fp8"] <= between["model"] / 2
