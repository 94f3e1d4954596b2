"""Tests of the policy with Transformer Engine layers: parameters as in `models`, equal to the local spec, right norm.

The classes of Transformer Engine and megatron-core are real (`te`), built for every rank of every layout.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.config.schema.model import WITH_EXPERTS
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims, RankCoords
from tests.cuda import programs, te
from tests.cuda.ranks import Built, Case, build_ranks
from tests.families.models import CORRECTION_BIAS, YARN
from tests.support.ranks import run_ranks
from tests.support.selected import selected
from tests.weights.grids import LAYOUTS, MODELS, global_tensors

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

FAMILIES = {name: hf_config(BuildConfig(architecture=name, hidden=128)) for name in WITH_EXPERTS[1:]}
"""A model of two layers for every family but the default, which `MODELS` has."""
FAMILIES["deepseek_v3"] |= {"n_group": 4, "topk_group": 1, "rope_parameters": YARN}
FAMILIES["glm4_moe Air"] = FAMILIES["glm4_moe"] | {"use_qk_norm": False}
FAMILIES["deepseek_v3 Moonlight"] = FAMILIES["deepseek_v3"] | {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": None,
}
MORE_MODELS = MODELS | {"wide_moe": hf_config(BuildConfig(layers=2, heads=8, kv_heads=4, experts=8))} | FAMILIES
MORE_LAYOUTS = LAYOUTS | {
    "tp4 ep8 dp2": ParallelDims(8, tensor=4, expert=8),
    "tp4 ep2 etp2": ParallelDims(4, tensor=4, expert=2, expert_tensor=2),
    "tp2 cp2 ep4 dp2": ParallelDims(8, tensor=2, context=2, expert=4),
    "ep2 dp4": ParallelDims(4, expert=2),
}

PAIRS = [
    *(("qwen3_moe", layout) for layout in LAYOUTS),
    *(("qwen3_moe_mixed", layout) for layout in ("tp2 pp2 ep2", "tp2 ep2 etp2", "pp2 of 3 1 ep2", "cp2 ep2", "pp4")),
    *(("wide_moe", layout) for layout in ("tp4 ep8 dp2", "tp4 ep2 etp2", "tp2 cp2 ep4 dp2", "ep2 dp4")),
    *(("qwen2_tied", layout) for layout in ("one", "dp2", "tp2", "pp2", "pp2 vpp2", "pp3 of 1 2 1")),
    *(("qwen3", layout) for layout in ("tp2", "pp2")),
    *(("llama", layout) for layout in ("one", "tp2")),
    *(
        (family, layout)
        for family in FAMILIES
        for layout in ("one", "tp2", "tp2 ep2", "ep2", "pp2")
        if (family, layout) != ("gpt_oss", "tp2")  # experts with biases are not split by columns
    ),
    *((family, "cp2 ep2") for family in ("glm4_moe", "deepseek_v3", "gpt_oss")),
]  # fmt: skip
EVERY_CHANGE = {
    ("gpt_oss", "tp2 ep2"),
    ("qwen3_moe", "one"),
    ("qwen3_moe", "tp2 ep2"),
    ("qwen3_moe", "cp2 ep2"),
    ("qwen3_moe_mixed", "tp2 ep2 etp2"),
    ("qwen3_moe_mixed", "pp2 of 3 1 ep2"),
    ("wide_moe", "ep2 dp4"),
    ("qwen2_tied", "tp2"),
    ("qwen2_tied", "pp2 vpp2"),
    ("qwen3", "tp2"),
    ("llama", "one"),
    ("qwen2_moe", "tp2 ep2"),
    ("glm4_moe", "tp2 ep2"),
    ("minimax_m2", "tp2 ep2"),
    ("deepseek_v3", "tp2 ep2"),
    ("deepseek_v3 Moonlight", "tp2 ep2"),
    ("qwen3_next", "tp2 ep2"),
}
"""Pairs tested with every change: each kind of parallelism, and each kind of block; all pairs run nightly."""
DTYPES = {"one": "float32", "tp2": "float32", "tp2 ep2": "float32"}
"""Dtypes by layout. Most layouts use bfloat16, because master weights take another code path than a float32 model.
`FAMILIES` always do: their frozen parameters stay in float32."""

Key = tuple[str, str, str]


def case(model: str, layout: str, spec: str) -> Case:
    hf = MORE_MODELS[model]
    dtype = "bfloat16" if model in FAMILIES else DTYPES.get(layout, "bfloat16")
    return Case(hf, MORE_LAYOUTS[layout], spec, dtype, global_tensors(architecture(hf).tensors(hf), seed=3))


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[Key, list[Built]]:
    """Returns every rank of the selected pairs in both specs, from one process with Transformer Engine's classes."""
    keys = [(*pair, spec) for pair in selected(request, "model", "layout") for spec in ("te", "local")]
    cases = pickle.dumps([case(*key) for key in keys])  # as objects, each tensor would be sent through a file
    (answers,) = run_ranks(1, build_ranks, cases, timeout=850, server=programs.server({}))
    return dict(zip(keys, answers, strict=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        params = [
            pytest.param(
                *pair, id="-".join(pair).replace(" ", "_"), marks=[] if pair in EVERY_CHANGE else [pytest.mark.nightly]
            )
            for pair in PAIRS
        ]
        metafunc.parametrize(("model", "layout"), params)


@pytest.mark.parametrize("spec", ["te", "local"])
def test_names_shapes_and_order(built: dict[Key, list[Built]], model: str, layout: str, spec: Any) -> None:
    hf, parallel = MORE_MODELS[model], MORE_LAYOUTS[layout]
    for rank, rank_built in enumerate(built[model, layout, spec]):
        shard = architecture(hf).megatron_shard(hf, parallel, rank, spec)
        assert list(rank_built.params) == list(shard.params)
        for name, shape in rank_built.params.items():
            declared = shard.params[name]  # a shape of other dimensions has the same elements in order
            assert declared == shape or (len(declared) != len(shape) and math.prod(declared) == math.prod(shape)), name


@pytest.mark.parametrize("spec", ["te", "local"])
def test_only_correction_biases_are_frozen_and_stay_in_float32(
    built: dict[Key, list[Built]], model: str, layout: str, spec: Any
) -> None:
    hf, parallel = MORE_MODELS[model], MORE_LAYOUTS[layout]
    for rank, rank_built in enumerate(built[model, layout, spec]):
        pieces = architecture(hf).megatron_shard(hf, parallel, rank, spec).pieces
        biases = {piece.param for piece in pieces if piece.tensor.endswith(CORRECTION_BIAS)}
        assert rank_built.frozen == dict.fromkeys(biases, "float32")


@pytest.mark.parametrize("spec", ["te", "local"])
def test_every_gradient_counts_once_in_the_norm(
    built: dict[Key, list[Built]], model: str, layout: str, spec: str
) -> None:
    """Compares the squares counted by all ranks with the squares of the whole gradients."""
    ranks = built[model, layout, spec]
    everybody = list(range(len(ranks)))
    assert all(group == everybody for rank_built in ranks for group in rank_built.norm_ranks)
    counted: dict[str, float] = defaultdict(float)
    for rank_built in ranks:
        for part in rank_built.parts:
            for name, counted_update in part.items():
                counted["experts" if ".experts." in name else "others"] += counted_update.squares
    whole: dict[str, float] = defaultdict(float)
    for name, gradient in case(model, layout, spec).gradients.items():
        if not name.endswith(CORRECTION_BIAS):
            whole["experts" if ".experts." in name else "others"] += squared(gradient)
    for kind in whole:
        assert math.sqrt(counted[kind]) == pytest.approx(math.sqrt(whole[kind]), rel=1e-6), kind


def squared(gradient: Tensor) -> float:
    return float(gradient.double().square().sum())


def test_attributes_are_the_local_specs(built: dict[Key, list[Built]], model: str, layout: str) -> None:
    """Compares attributes by a parameter's content, because names differ between the specs."""
    hf, parallel = MORE_MODELS[model], MORE_LAYOUTS[layout]
    for rank, (engine, local) in enumerate(zip(built[model, layout, "te"], built[model, layout, "local"], strict=True)):
        by_spec = [
            {holds: meaning(rank_built.attributes[name]) for name, holds in contents(hf, parallel, rank, spec)}
            for spec, rank_built in (("te", engine), ("local", local))
        ]
        assert by_spec[0] == by_spec[1]


def meaning(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes with megatron-core's defaults; the cut dimension matters only to the loader."""
    defaults = dict(tensor_model_parallel=False, allreduce=True, sequence_parallel=False, shared=False,
                    shared_embedding=False)  # fmt: skip
    known = {name: attributes.get(name, default) for name, default in defaults.items()}
    assert "partition_dim" not in attributes or attributes["partition_dim"] in (-1, 0, 1)
    return known


def contents(hf: dict[str, Any], parallel: ParallelDims, rank: int, spec: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields each parameter with its Hugging Face tensors and their positions."""
    pieces_of: dict[str, list[Any]] = defaultdict(list)
    for piece in architecture(hf).megatron_shard(hf, parallel, rank, spec).pieces:
        pieces_of[piece.param].append((piece.tensor, str(piece.box), piece.offset))
    for name, pieces in pieces_of.items():
        yield name, (name.split(".")[0], *pieces)


@pytest.mark.parametrize("spec", ["te", "local"])
def test_optimizers_share_out_every_parameter_once(
    built: dict[Key, list[Built]], model: str, layout: str, spec: str
) -> None:
    """Checks that experts have a separate optimizer under expert parallelism, and that norms and biases do not
    decay."""
    parallel = MORE_LAYOUTS[layout]
    runs: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[tuple[Any, ...], int] = {}
    for rank, rank_built in enumerate(built[model, layout, spec]):
        at = parallel.coordinates(rank)
        for i, part in enumerate(rank_built.parts):
            for name, update in part.items():
                assert update.decay == (0.0 if len(rank_built.params[name]) == 1 else 1.0), name
                assert i == int(".experts." in name and parallel.expert > 1), name
                runs[place(at, name)].append(update.run)
        trained = {name: shape for name, shape in rank_built.params.items() if name not in rank_built.frozen}
        sizes |= {place(at, name): math.prod(shape) for name, shape in trained.items()}
    assert set(runs) == set(sizes)
    for parameter, parts in runs.items():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1] and ends[-1] == sizes[parameter], parameter


def place(at: RankCoords, name: str) -> tuple[Any, ...]:
    """Returns the coordinates shared by all ranks with the same part of a parameter."""
    return (at.pp, at.ep, at.etp, name) if ".experts." in name else (at.pp, at.tp, name)


def test_the_sharded_state_covers_every_tensor_once(built: dict[Key, list[Built]], model: str, layout: str) -> None:
    """Checks the stored elements of Transformer Engine's layers in megatron-core's sharded state, over all storing
    ranks."""
    own_modules = "linear_num_key_heads" in MORE_MODELS[model] or model == "gpt_oss"
    if own_modules and MORE_LAYOUTS[layout].tensor > 1:
        pytest.skip("delta nets and sinks have no sharded state in megatron-core's format; the project reads none")
    covered: dict[str, np.ndarray] = {}
    for rank_built in built[model, layout, "te"]:
        for key, whole, offset, local, stores in rank_built.stored:
            count = covered.setdefault(key, np.zeros(whole, np.int8))
            assert count.shape == tuple(whole)
            if stores:
                count[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))] += 1
    assert all((count == 1).all() for count in covered.values())
    hf = MORE_MODELS[model]
    padding = architecture(hf).padded_vocab(hf, MORE_LAYOUTS[layout].tensor) - hf["vocab_size"]
    vocabularies = sum("word_embeddings" in key or "output_layer" in key for key in covered)
    elements = sum(math.prod(shape) for shape in architecture(hf).tensors(hf).values())
    assert sum(count.size for count in covered.values()) == elements + vocabularies * padding * hf["hidden_size"]
