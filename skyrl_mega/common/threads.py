"""Calls of a function for many items, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(do: Callable[[Item], Result], items: Iterable[Item], threads: int, name: str) -> list[Result]:
    """Returns the results of `do` in the order of `items`. After the first error no further call starts; the calls
    under way end, and the error is raised.

    Args:
        do: The function, called from several threads at once.
        items: Arguments of the calls.
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
