"""Calls of a function for many items, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(do: Callable[[Item], Result], items: Iterable[Item], threads: int, name: str) -> list[Result]:
    """Returns the results of `do` in the order of `items`; [] without items. Raises the error of the first item, in
    this order, whose call fails. The error is seen once the calls of all earlier items have ended: then no further call
    starts, and the calls under way end first.

    Args:
        do: The function, called from several threads at once.
        items: Arguments of the calls, all read before the function returns.
        threads: Largest number of calls at once.
        name: Name of the threads.
    """
    with ThreadPoolExecutor(threads, name) as pool:
        futures = [pool.submit(do, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
