"""What a measurement needs around it: its device, its threads, and a sentence when the memory does not suffice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mgk.bench.errors import BenchError

# The CPU's allocator raises a plain RuntimeError with one of these in it.
_OUT_OF_MEMORY = ("allocate memory", "Storage size calculation overflowed")


@contextmanager
def measuring(threads: int | None, *, smaller: str) -> Iterator[None]:
    """Measure on so many threads of the CPU; a :class:`BenchError` where the memory does not suffice.

    Args:
        threads: None leaves them as torch has them.
        smaller: what the user could choose smaller then.
    """
    try:
        with cpu_threads(threads):
            yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            raise BenchError(f"there is not enough memory for these sizes: choose a smaller {smaller}") from error
        raise


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Let torch use so many threads of the CPU; None leaves them as they are."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_device(name: str) -> torch.device:
    """The device of that name; a :class:`BenchError` where this machine has none."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
        raise BenchError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
