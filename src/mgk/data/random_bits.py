"""Random numbers that are the same on every machine, in every version, for any number of workers.

Integer arithmetic on Philox, a counter-based generator whose raw output NumPy keeps stable between versions. A stream
is named by a seed and a path of numbers, such as a block or an example, so no two pieces of work share one.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(count: int, seed: int, *path: int) -> NDArray[np.int64]:
    """The numbers below ``count`` in an order that the seed and path determine."""
    return np.argsort(Stream(seed, *path).bits(count), kind="stable")


class Stream:
    """One stream of bits, read from front to back."""

    def __init__(self, seed: int, *path: int) -> None:
        name = ",".join(str(number) for number in (seed, *path)).encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
        self._generator = np.random.Philox(key=key)

    def bits(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words of 64 bits."""
        words: NDArray[np.uint64] = self._generator.random_raw(count)
        return words

    def below(self, limit: int, count: int) -> NDArray[np.int64]:
        """The next ``count`` numbers from 0 to ``limit - 1``; the bias is below ``limit`` / 2^32."""
        return ((self.bits(count) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)
