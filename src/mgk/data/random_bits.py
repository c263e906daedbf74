"""Random numbers, the same on every machine, for any number of workers.

Integer arithmetic on Philox, whose raw output NumPy keeps stable.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(count: int, seed: int, *path: int) -> NDArray[np.int64]:
    """The numbers below ``count`` in an order given by seed and path."""
    return np.argsort(Stream(seed, *path).bits(count), kind="stable")


class Stream:
    """One stream of bits."""

    def __init__(self, seed: int, *path: int) -> None:
        name = ",".join(str(number) for number in (seed, *path)).encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
        self._generator = np.random.Philox(key=key)

    def bits(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words of 64 bits."""
        words: NDArray[np.uint64] = self._generator.random_raw(count)
        return words

    def below(self, limit: int, count: int) -> NDArray[np.int64]:
        """The next ``count`` numbers below ``limit``; bias below limit / 2^32."""
        high = self.bits(count) >> np.uint64(32)
        return (high * np.uint64(limit) >> np.uint64(32)).astype(np.int64)
