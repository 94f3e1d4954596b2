"""Packing loses nothing, predicts the next token, and cuts sequences in zigzag as megatron-core does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.megatron.packing import pack
from skyrl_mega.megatron.sequences import Sequences

CPU = torch.device("cpu")


def batch_of(lengths: list[int]) -> Sequences:
    batch = Sequences.of([list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)])
    batch.fields["x"] = np.arange(len(batch.tokens), dtype=np.float32) + 1
    return batch


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_every_token_is_predicted_once_over_the_context_ranks(lengths: list[int], context: int, tensor: int) -> None:
    batch = batch_of(lengths)
    seen = np.zeros(len(batch.tokens), int)
    for rank in range(context):
        micro = pack(batch, context=context, context_rank=rank, tensor=tensor, device=CPU)
        assert micro.tokens.shape[1] % tensor == 0
        known = (micro.source >= 0).numpy()
        source = micro.source.numpy()[known]
        seen[source] += 1
        # Each input is the token before the one it predicts, and fields belong to the predicted token.
        np.testing.assert_array_equal(micro.tokens[0].numpy()[known], batch.tokens[source - 1])
        np.testing.assert_array_equal(micro.targets.numpy()[known], batch.tokens[source])
        np.testing.assert_array_equal(micro.fields["x"].numpy()[known], batch.fields["x"][source])
        assert not micro.fields["x"].numpy()[~known].any()
    first = np.isin(np.arange(len(batch.tokens)), batch.starts)
    np.testing.assert_array_equal(seen, (~first).astype(int))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_zigzag_chunks(lengths: list[int], context: int) -> None:
    """Rank r holds chunks r and 2·cp-1-r of each padded sequence, in that order."""
    batch = batch_of(lengths)
    for rank in range(context):
        row = pack(batch, context=context, context_rank=rank, tensor=1, device=CPU).row
        assert row.sequence_L is not None and row.position_L is not None
        bounds = row.cu_seqlens_q.numpy()
        for i, (start, stop) in enumerate(pairwise(bounds)):
            width = (stop - start) // (2 * context)
            chunks = np.arange(stop - start).reshape(2 * context, width)
            expected = np.concatenate([chunks[rank], chunks[2 * context - 1 - rank]])
            np.testing.assert_array_equal(row.position_L[row.sequence_L == i].numpy(), expected)


def test_gathered_order_restores_the_row() -> None:
    """`global_L` finds each token of the row after the context ranks' parts are put one after another."""
    batch = batch_of([5, 9, 16])
    micros = [pack(batch, context=2, context_rank=r, tensor=1, device=CPU) for r in range(2)]
    gathered = torch.cat([m.tokens[0] for m in micros])
    order = micros[0].row.global_L
    assert order is not None
    whole = pack(batch, context=1, context_rank=0, tensor=1, device=CPU)
    restored = gathered[order].numpy()
    bounds = micros[0].row.cu_seqlens_q.numpy()
    for i, n in enumerate(batch.lengths):
        np.testing.assert_array_equal(
            restored[bounds[i] : bounds[i] + n], whole.tokens[0][batch.starts[i] :][:n].numpy()
        )
