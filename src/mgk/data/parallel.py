"""Runs numbered pieces of work on several processes and hands them back in order."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from typing import TypeVar

Piece = TypeVar("Piece")


def in_order(work: Callable[[int], Piece], workers: int) -> Generator[Piece]:
    """``work(0)``, ``work(1)``, ... without end; close the iterator to stop.

    With one worker everything runs here. With more, ``work`` must be picklable, and a script needs the usual
    ``if __name__ == "__main__"``: processes are spawned, because a fork of a process with threads may hang.
    """
    if workers == 1:
        yield from map(work, count())
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    waiting: deque[Future[Piece]] = deque()
    try:
        for number in count():
            waiting.append(pool.submit(work, number))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
