"""Work that succeeds on all ranks of torch's default group, or fails on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from skyrl_mega.common.errors import UserError

Answer = TypeVar("Answer")


def on_all_ranks(do: Callable[[], Answer]) -> list[Answer]:
    """Calls `do` on every rank and returns all results. A collective: fails on all ranks or on none.

    Raises:
        UserError: Raised by a rank; re-raised unchanged on every rank.
        RuntimeError: An OSError occurred on a rank; names the rank and the reason.
    """
    answer: Answer | None = None
    io_error: str | None = None
    user_error: UserError | None = None
    try:
        answer = do()
    except UserError as error:
        user_error = error
    except OSError as error:
        io_error = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (answer, io_error, user_error))
    if any(io_errors := [io_error for _, io_error, _ in outcomes if io_error]):
        raise RuntimeError("; ".join(io_errors))
    if first := next((user_error for _, _, user_error in outcomes if user_error), None):
        raise first
    return [answer for answer, _, _ in outcomes]
