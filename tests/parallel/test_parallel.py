"""Tests of coordinates and stages against megatron-core's generators."""

import itertools

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import LayoutConfig
from skyrl_mega.parallel.dims import ParallelDims

GRIDS = [
    (tp, cp, dp, pp, ep, etp)
    for tp, cp, dp, pp, ep, etp in itertools.product([1, 2, 4], [1, 2], [1, 2, 3], [1, 2], [1, 2, 4], [1, 2])
    if (tp * cp * dp) % (ep * etp) == 0
]


def place(groups: list[list[int]], rank: int) -> int:
    """Returns the index of `rank` in its group."""
    (group,) = [g for g in groups if rank in g]
    return group.index(rank)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_coordinates_are_megatrons(grid: tuple[int, ...]) -> None:
    from megatron.core.parallel_state import RankGenerator

    tp, cp, dp, pp, ep, etp = grid
    ranks = tp * cp * dp * pp
    parallel = ParallelDims(ranks, tensor=tp, pipeline=pp, context=cp, expert=ep, expert_tensor=etp)
    edp = ranks // (ep * etp * pp)
    assert (parallel.data, parallel.expert_data) == (dp, edp)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    dense_groups = {name: dense.get_ranks(name) for name in ("tp", "cp", "dp", "pp")}
    expert_groups = {name: expert.get_ranks(name) for name in ("tp", "ep", "dp", "pp")}
    for rank in range(ranks):
        at = parallel.coordinates(rank)
        assert at.tp == place(dense_groups["tp"], rank)
        assert at.cp == place(dense_groups["cp"], rank)
        assert at.dp == place(dense_groups["dp"], rank)
        assert at.pp == place(dense_groups["pp"], rank) == place(expert_groups["pp"], rank)
        assert at.etp == place(expert_groups["tp"], rank)
        assert at.ep == place(expert_groups["ep"], rank)
        assert at.edp == place(expert_groups["dp"], rank)


@pytest.mark.parametrize("pp, vpp, layers", [(1, 1, 3), (2, 1, 4), (2, 2, 8), (4, 1, 8), (2, 4, 8), (3, 2, 12)])
def test_stage_layers_are_megatrons(pp: int, vpp: int, layers: int) -> None:
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    parallel = ParallelDims(pp, pipeline=pp, virtual_pipeline=vpp)
    seen = []
    for stage in range(pp):
        for chunk in range(vpp):
            stage_layers = parallel.stage_layers(layers, stage, chunk)
            vp_stage = chunk if vpp > 1 else None
            assert stage_layers.start == get_transformer_layer_offset(config, vp_stage, stage)
            assert len(stage_layers) == get_num_layers_to_build(config, vp_stage, stage)
            assert parallel.holds_embedding(stage, chunk) == (0 in stage_layers)
            assert parallel.holds_head(stage, chunk) == (layers - 1 in stage_layers)
            seen.extend(stage_layers)
    assert sorted(seen) == list(range(layers))


def test_expert_tensor_defaults() -> None:
    assert ParallelDims.from_config(LayoutConfig(tensor=2), 4).expert_tensor == 2
    assert ParallelDims.from_config(LayoutConfig(tensor=2, expert=2), 4).expert_tensor == 1
    assert ParallelDims.from_config(LayoutConfig(tensor=2, expert=2, expert_tensor=2), 4).expert_tensor == 2


@pytest.mark.parametrize(
    "sizes, word",
    [
        ({"ranks": 6, "tensor": 4}, "does not divide the 6 ranks"),
        ({"ranks": 2, "expert": 4}, "does not divide the 2 ranks"),
        ({"ranks": 2, "virtual_pipeline": 2}, "virtual_pipeline"),
    ],
)
def test_impossible_grids_are_refused(sizes: dict[str, int], word: str) -> None:
    for key in ("policy.layout", "reference.layout"):
        with pytest.raises(UserError, match=word) as error:
            ParallelDims(**sizes, key=key)
        assert str(error.value).startswith(key) and "\n" not in str(error.value)


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 layers"):
        ParallelDims(2, pipeline=2).stage_layers(5, 0)
