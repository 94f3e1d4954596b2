"""Tests of parameters in FP8, as Transformer Engine tensors, in two data-parallel ranks.

Python of Transformer Engine and megatron-core is real (`te`), kernels are plain torch (`te_fp8`). Comparisons are the
same policy with bfloat16 parameters, the files, and a plain loop that rounds block after block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_mega.config.precision import environment
from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig, PrecisionConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import programs, te
from tests.cuda.te_fp8 import BLOCK, LARGEST, PIECE, Answer, Case, go
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

MODEL = BuildConfig(
    layers=3, hidden=256, heads=4, kv_heads=2, head_dim=128, experts=4, expert_ffn=128, tokenizer="none"
)
RANKS = 2
STEPPED = "step 1"


def policy(parameters: str, overlap: bool) -> PolicyConfig:
    precision = PrecisionConfig("fp8_blockwise", parameters=parameters, first_layers=1)
    return PolicyConfig(
        spec="te", overlap=overlap, precision=precision, optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0)
    )


Found = dict[str, list[Answer]]


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Returns True if parameters are gathered during the next pass, as on GPUs; False if gathered at once."""
    return bool(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, overlap: bool) -> Path:
    path = tmp_path_factory.mktemp("fp8_parameters")
    build(MODEL, path / "model", seed=1)
    build(MODEL, path / "other", seed=2)
    return path


@pytest.fixture(scope="module")
def found(folder: Path, overlap: bool) -> Found:
    """Returns each rank's results, with parameters in bfloat16 and in FP8."""
    return {name: run(folder, name, overlap) for name in ("model", "fp8")}


def run(folder: Path, name: str, overlap: bool) -> list[Answer]:
    case = Case(folder, ParallelDims(RANKS), name, policy(name, overlap))
    server = programs.server(environment(case.policy.precision))
    return run_ranks(RANKS, go, case, timeout=programs.LIMIT_S, server=server)


def test_linear_layers_are_in_fp8_and_nothing_else(found: Found) -> None:
    """Checks that attention and experts of layers 1 and 2 are in FP8; layer 0 is set to bfloat16."""
    assert not found["model"][0].fp8
    every = set(found["model"][0].weights["built"])
    linear = {n for n in every if ".linear_" in n and n.rsplit(".", 1)[1].startswith("weight")}
    assert found["fp8"][0].fp8 == {name for name in linear if ".layers.0." not in name}
    assert set(found["fp8"][0].weights["built"]) == every | {f"{name}_scale_inv" for name in found["fp8"][0].fp8}


def test_a_gather_moves_half_the_bytes(found: Found) -> None:
    """Compares the bytes of a gather: one byte for each FP8 number instead of two, except padding."""
    small, large = (found[name][0] for name in ("fp8", "model"))
    assert small.buffers == {"torch.uint8", "torch.bfloat16"} and large.buffers == {"torch.bfloat16"}
    numbers = sum(small.weights["built"][name].size for name in small.fp8)
    assert large.gathered - small.gathered == pytest.approx(numbers, abs=2048)


@pytest.mark.parametrize("moment", ["loaded", "step 0", STEPPED, "reference gone", "back"])
def test_master_weights_are_those_beside_bfloat16(found: Found, moment: str) -> None:
    """Compares master weights with the bfloat16 policy: unrounded values of a file, then the same steps."""
    for name in masters(found["model"], moment):
        np.testing.assert_array_equal(masters(found["fp8"], moment)[name], masters(found["model"], moment)[name])


@pytest.mark.parametrize("moment", ["loaded", "step 0", STEPPED, "reference", "restored", "alone"])
def test_numbers_and_scales_are_of_the_bfloat16_weights(found: Found, moment: str) -> None:
    """Compares numbers and scales with a loop over blocks; the multiplier is 448 / magnitude, as in Transformer Engine.
    So no computation differs from bfloat16 parameters, because every pass rounds these in the same way."""
    for rank in range(RANKS):
        plain, mine = found["model"][rank].weights[moment], found["fp8"][rank].weights[moment]
        for name, values in plain.items():
            if name not in found["fp8"][rank].fp8:
                np.testing.assert_array_equal(mine[name], values)
                continue
            numbers, scales = rounded(torch.from_numpy(values))
            assert torch.equal(torch.from_numpy(mine[name]), numbers), name
            np.testing.assert_array_equal(mine[f"{name}_scale_inv"], scales.numpy())


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns E4M3 numbers as uint8, and the scales."""
    rows, columns = (-(-n // BLOCK) for n in values.shape)
    numbers, scales = torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scale = LARGEST / values[block].abs().max()
            numbers[block] = (values[block] * scale).to(torch.float8_e4m3fn).view(torch.uint8)
            scales[i, j] = 1 / scale
    return numbers, scales


def test_what_a_backward_pass_reads_is_never_stale(found: Found) -> None:
    """Checks the backward copies after loads, steps, a reference swap, an offload, a new optimizer and a restored
    checkpoint."""
    for answer in found["fp8"]:
        assert len(answer.backward) == 8 and all(answer.backward.values()), answer.backward


def test_all_ranks_have_one_set_of_weights(found: Found) -> None:
    first, second = found["fp8"]
    for moment, weights in first.weights.items():
        if moment != "built":  # random on each rank
            same(weights, second.weights[moment])


@pytest.mark.parametrize("moment", ["reference gone", "back", "reset", "restored"])
def test_nothing_else_changes_a_weight(found: Found, moment: str) -> None:
    """Checks that the weights stay. A new optimizer takes master weights from bfloat16 parameters, never from FP8
    ones."""
    for answer in found["fp8"]:
        same(answer.weights[moment], answer.weights[STEPPED])
        for name, values in answer.masters[STEPPED].items():
            if name in answer.fp8 or moment in ("reference gone", "back"):
                np.testing.assert_array_equal(answer.masters[moment][name], values)


def test_the_reference_is_another_model(found: Found) -> None:
    weights = found["fp8"][0].weights
    assert all((weights["reference"][name] != weights[STEPPED][name]).any() for name in found["fp8"][0].fp8)


def test_memory(found: Found) -> None:
    """Checks memory: two bytes a number, two scales a block, and only forward copies for a reference. An offload leaves
    nothing on the device, and no master weight keeps a whole parameter alive. Transfers are a few large copies."""
    answer, plain = (found[name][0] for name in ("fp8", "model"))
    blocks = 4 * 4 * len(answer.fp8) * 16  # a generous bound for so small a model: 64 blocks a tensor
    assert answer.bytes["parameters"] == pytest.approx(plain.bytes["parameters"], abs=blocks)
    numbers = sum(answer.weights["built"][name].size for name in answer.fp8)
    assert plain.bytes["reference"] - answer.bytes["reference"] == pytest.approx(numbers, abs=blocks)
    assert answer.away == 0 and answer.excess == 0
    assert answer.copies <= 6


def test_master_weights_are_rounded_in_pieces(found: Found) -> None:
    """Checks that master weights are rounded in pieces: Transformer Engine first makes bfloat16 copies of its input."""
    for answer in found["fp8"]:
        numbers = sum(answer.weights["built"][name].size for name in answer.fp8)
        assert max(answer.pieces) <= PIECE < numbers / 4
        assert sum(answer.pieces) == numbers * 5, "a load, three steps and a restored checkpoint"
        assert len(answer.pieces) < 0.8 * 5 * len(answer.fp8), "several together where they have room"


def test_an_export_has_what_engines_got(found: Found, folder: Path) -> None:
    """Compares an export with the engines' weights: numbers times scales in bfloat16; other tensors unchanged."""
    exported = load_file(folder / "fp8-export" / "model.safetensors")
    weights = found["fp8"][0].weights[STEPPED]
    name = "0.decoder.layers.1.self_attention.linear_proj.weight"
    numbers = torch.from_numpy(weights[name]).view(torch.float8_e4m3fn).float()
    scales = torch.from_numpy(weights[f"{name}_scale_inv"])
    rows, columns = numbers.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    assert torch.equal(exported["model.layers.1.self_attn.o_proj.weight"], (numbers * spread).bfloat16())
    embedding = torch.from_numpy(weights["0.embedding.word_embeddings.weight"]).bfloat16()
    assert torch.equal(exported["model.embed_tokens.weight"], embedding[: len(exported["model.embed_tokens.weight"])])


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, values in a.items():
        np.testing.assert_array_equal(values, b[name], err_msg=name)


def masters(ranks: list[Answer], moment: str) -> dict[str, Any]:
    """Returns whole master weights by name, joined from the ranks' ranges."""
    names = {name for answer in ranks for name in answer.masters[moment]}
    return {n: np.concatenate([a.masters[moment][n] for a in ranks if n in a.masters[moment]]) for n in names}
