"""The arrays of a prepared split, mapped into memory. Does not import torch."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import UsageError, fail
from mgk.data.manifest import Manifest


class Split:
    """One split, cheap to pickle: each worker maps the files itself."""

    def __init__(self, folder: Path, manifest: Manifest, name: str) -> None:
        if name not in manifest.splits:
            there = ", ".join(manifest.splits)
            if name == "validation":
                there += "; LRA uses 'test', or prepare it with a 'validation' option"
            raise UsageError(f"{manifest.task} has no split {name!r}, only {there}")
        self.folder, self.manifest, self.name = folder, manifest, name
        self._open: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return self.manifest.examples(self.name)

    def __contains__(self, array: str) -> bool:
        return array in self.manifest.splits[self.name]

    def __getitem__(self, array: str) -> NDArray[Any]:
        if array not in self._open:
            spec = self.manifest.splits[self.name][array]
            path = self.folder / self.manifest.build / spec.file
            try:
                self._open[array] = np.memmap(path, spec.dtype, "r", shape=spec.shape)
            except (OSError, ValueError) as error:
                fail(str(path), f"cannot be mapped ({error}); the set was replaced or is corrupt")
        return self._open[array]


class MappedTokens:
    """The tokens of running text, as cheap to pickle as the split."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, piece: slice) -> NDArray[Any]:
        tokens: NDArray[Any] = self._split["tokens"][piece]
        return tokens
