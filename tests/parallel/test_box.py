"""Tests of shards: a module's tensor in the declared shape, or refused."""

from __future__ import annotations

import pytest
import torch

from skyrl_mega.parallel.box import Shard

SHARD = Shard({"rows": (4, 3), "interleaved": (2, 2, 3)}, ())


def test_a_tensor_in_another_shape_with_as_many_elements_is_a_view() -> None:
    tensor = torch.arange(12.0).view(4, 3)
    assert SHARD.shaped("rows", tensor) is tensor
    view = SHARD.shaped("interleaved", tensor)
    assert view.shape == (2, 2, 3) and view.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(8, 3), (4, 6), (3, 4), (2, 3)])
def test_a_tensor_with_other_rows_or_columns_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^rows has the shape .*, but its shard declares \(4, 3\)$"):
        SHARD.shaped("rows", torch.zeros(shape))


def test_a_tensor_with_other_dimensions_and_another_number_of_elements_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^interleaved has the shape \(8, 3\), but its shard declares \(2, 2, 3\)$"):
        SHARD.shaped("interleaved", torch.zeros(8, 3))
