"""Runs numbered pieces of work on several processes; the results are in order."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from typing import TypeVar

from mgk._util.signals import starting_processes

Piece = TypeVar("Piece")


def in_order(work: Callable[[int], Piece], workers: int) -> Generator[Piece]:
    """``work(0)``, ``work(1)``, ... without end; close the iterator to stop.

    More than one worker needs a picklable ``work`` and, in a script,
    ``if __name__ == "__main__"``: a fork of a process with threads may hang.
    """
    if workers == 1:
        yield from map(work, count())
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_the_parent)
    waiting: deque[Future[Piece]] = deque()
    try:
        with starting_processes():  # which leave signals to this one
            waiting.append(pool.submit(work, 0))
        for number in count(1):
            waiting.append(pool.submit(work, number))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_the_parent() -> None:
    """End a worker whose parent was killed; it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
