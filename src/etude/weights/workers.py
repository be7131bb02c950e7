"""Work on many pieces side by side, a few ahead of whoever takes the results: memory stays that of a few pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """function(item) of each item, in their order, at most `threads` + 1 of them begun and not taken.

    The first error ends it: it is raised where its result would have been, and what has not begun never begins. One
    thread is the caller's own.
    """
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="weights")
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
