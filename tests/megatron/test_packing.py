"""Tests of packing: no token is lost, each position predicts the next token, sequences are split in megatron-core's
zigzag."""

from __future__ import annotations

import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.megatron.packing import pack
from skyrl_mega.trajectories.sequences import Column, Sequences


def batch_of(lengths: list[int]) -> Sequences:
    """Returns tokens, a value for each token, and two integers for each input token."""
    batch = Sequences.of([list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)])
    count = len(batch.tokens)
    batch["x"] = torch.arange(count, dtype=torch.float32) + 1
    batch.add("routes", Column(torch.arange(1, 6 * count + 1).reshape(count, 3, 2).to(torch.int16), aligned="input"))
    return batch


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_every_token_is_predicted_once_over_the_context_ranks(lengths: list[int], context: int, tensor: int) -> None:
    batch = batch_of(lengths)
    seen = np.zeros(len(batch.tokens), int)
    for rank in range(context):
        micro = pack(batch, context=context, context_rank=rank, tensor=tensor)
        assert micro.tokens.shape[1] % tensor == 0
        known = (micro.source >= 0).numpy()
        source = micro.source.numpy()[known]
        seen[source] += 1
        # An input is the token before its predicted token; values belong to the predicted token.
        np.testing.assert_array_equal(micro.tokens[0].numpy()[known], batch.tokens[source - 1])
        np.testing.assert_array_equal(micro.targets.numpy()[known], batch.tokens[source])
        np.testing.assert_array_equal(micro.columns["x"].numpy()[known], batch["x"][source])
        assert not micro.columns["x"].numpy()[~known].any()
    first = np.isin(np.arange(len(batch.tokens)), batch.starts)
    np.testing.assert_array_equal(seen, (~first).astype(int))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_what_goes_with_an_input_is_there_once_over_the_context_ranks(
    lengths: list[int], context: int, tensor: int
) -> None:
    """Checks the columns of input tokens, including a sequence's last token (without a prediction); shape and dtype
    stay."""
    batch = batch_of(lengths)
    routes = {}
    for rank in range(context):
        micro = pack(batch, context=context, context_rank=rank, tensor=tensor)
        assert micro.columns["routes"].dtype == torch.int16
        assert micro.row.sequence_L is not None and micro.row.position_L is not None
        places = zip(micro.row.sequence_L.tolist(), micro.row.position_L.tolist(), strict=True)
        for (sequence, position), token, route in zip(
            places, micro.tokens[0].tolist(), micro.columns["routes"].tolist(), strict=True
        ):
            if sequence < len(lengths) and position < lengths[sequence]:
                assert (sequence, position) not in routes and token == 100 * sequence + position
                routes[sequence, position] = route
            else:
                assert not np.any(route)
    in_order = [routes[i, j] for i, n in enumerate(lengths) for j in range(n)]
    assert in_order == batch["routes"].tolist()


def test_columns_move_with_their_sequences() -> None:
    batch = batch_of([3, 4, 2])
    part, some = batch.part(1, 3), batch.take([2, 0])
    assert part.tokens.tolist() == [100, 101, 102, 103, 200, 201] and some.tokens.tolist() == [200, 201, 0, 1, 2]
    assert torch.equal(part["routes"], batch["routes"][3:]) and part["x"].data_ptr() == batch["x"][3:].data_ptr()
    assert torch.equal(some["routes"], batch["routes"][[7, 8, 0, 1, 2]])
    assert some.columns["routes"].aligned == part.columns["routes"].aligned == "input"
    with pytest.raises(ValueError, match="column y: 8 values for 9 tokens"):
        batch["y"] = torch.zeros(8)


def test_sequences_travel_as_arrays_that_share_memory() -> None:
    """Pickles sequences as Ray does: the arrays' memory travels outside the pickle, read-only."""
    batch = batch_of([3, 4, 2])
    batch["half"] = torch.randn(9, 2).bfloat16()  # numpy has no such dtype
    batch["half"][0, 0] = float("nan")
    buffers: list[pickle.PickleBuffer] = []
    small = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 5 and len(small) < 1200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = pickle.loads(small, buffers=[bytes(b.raw()) for b in buffers])
    assert torch.equal(loaded.tokens, batch.tokens) and torch.equal(loaded.lengths, batch.lengths)
    assert loaded.columns["routes"].aligned == "input" and torch.equal(loaded["routes"], batch["routes"])
    assert loaded["half"].dtype is torch.bfloat16
    assert torch.equal(loaded["half"].view(torch.int16), batch["half"].view(torch.int16))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_zigzag_chunks(lengths: list[int], context: int) -> None:
    """Checks the zigzag: rank r holds chunks r and 2·cp-1-r of each padded sequence, in this order."""
    batch = batch_of(lengths)
    for rank in range(context):
        row = pack(batch, context=context, context_rank=rank, tensor=1).row
        assert row.sequence_L is not None and row.position_L is not None
        bounds = row.cu_seqlens_q.numpy()
        for i, (start, stop) in enumerate(pairwise(bounds)):
            width = (stop - start) // (2 * context)
            chunks = np.arange(stop - start).reshape(2 * context, width)
            expected = np.concatenate([chunks[rank], chunks[2 * context - 1 - rank]])
            np.testing.assert_array_equal(row.position_L[row.sequence_L == i].numpy(), expected)


def test_a_row_on_a_device_has_one_tensor_of_bounds() -> None:
    """Checks for a single shared tensor of bounds in a row. From this Transformer Engine concludes that no padding lies
    between sequences; else each layer computes bounds again and excludes kernels."""
    packed = pack(batch_of([3, 5]), context=2, context_rank=0, tensor=1).to(torch.device("meta"))
    row = packed.row
    assert row.cu_seqlens_q is not None and row.cu_seqlens_q.is_meta
    bounds = row.cu_seqlens_q, row.cu_seqlens_q_padded, row.cu_seqlens_kv, row.cu_seqlens_kv_padded
    assert all(tensor is bounds[0] for tensor in bounds)
    assert packed.source is not packed.read


def test_gathered_order_restores_the_row() -> None:
    """Checks `global_L`: each token's position in the row after the context ranks' parts are concatenated."""
    batch = batch_of([5, 9, 16])
    micros = [pack(batch, context=2, context_rank=r, tensor=1) for r in range(2)]
    gathered = torch.cat([m.tokens[0] for m in micros])
    order = micros[0].row.global_L
    assert order is not None
    whole = pack(batch, context=1, context_rank=0, tensor=1)
    restored = gathered[order].numpy()
    bounds = micros[0].row.cu_seqlens_q.numpy()
    for i, n in enumerate(batch.lengths):
        np.testing.assert_array_equal(
            restored[bounds[i] : bounds[i] + n], whole.tokens[0][batch.starts[i] :][:n].numpy()
        )
