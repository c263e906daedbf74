"""Time to draw the full Pathfinder set, 160,000/20,000/20,000, against a limit, and what can be told without its paths.

A model that follows no path can still look at how far apart the dots are, and at how bright the picture is. For each of
the two, the best threshold on one half of some pictures is tried on the other half. Exits with 1 when the time is over
the limit.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk._util.progress import Progress
from mgk.data import prepare
from mgk.data.pathfinder import DIFFICULTIES, PICTURES_PER_BLOCK, draw


def dot_distance(image: NDArray[np.uint8]) -> float:
    """Between the farthest of the brightest pixels: only dots are as bright as that."""
    bright = np.argwhere(image == image.max())
    return float(np.linalg.norm(bright[:, None] - bright, axis=-1).max())


def accuracy(cue: NDArray[np.float64], labels: NDArray[np.uint8]) -> float:
    """Of the best threshold on the first half, on the second."""
    half = len(cue) // 2
    cuts = np.unique(cue[:half])
    right = [((cue[:half] <= cut) == labels[:half]).mean() for cut in cuts]
    best = int(np.argmax(np.abs(np.array(right) - 0.5)))
    share = float(((cue[half:] <= cuts[best]) == labels[half:]).mean())
    return share if right[best] >= 0.5 else 1 - share


def without_paths(difficulty: str, blocks: int) -> dict[str, float]:
    """The accuracy of each cue."""
    drawn = [draw(1, number, difficulty) for number in range(blocks)]
    images = np.concatenate([block.images for block in drawn])
    labels = np.concatenate([block.labels for block in drawn])
    cues = {
        "distance_of_the_dots": np.array([dot_distance(image) for image in images]),
        "mean_brightness": images.mean((1, 2)),
    }
    return {name: round(accuracy(cue, labels), 4) for name, cue in cues.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to draw the full Pathfinder set, and what its cues tell.")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=40, help="of pictures to try cues on (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="in seconds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Progress("data_pathfinder") as on_step:
        start = time.perf_counter()
        manifest = prepare("pathfinder", out=Path(folder), workers=options.workers, on_step=on_step).manifest
        seconds = time.perf_counter() - start
    examples = {split: manifest.examples(split) for split in manifest.splits}
    told = {difficulty: without_paths(difficulty, options.blocks) for difficulty in DIFFICULTIES}
    print(f"pathfinder {examples} by {options.workers} processes: {seconds:.1f} s, limit {options.limit:g} s")
    print(f"labels told without following a path: {told}")
    if options.json is not None:
        figures = {
            "benchmark": "data_pathfinder",
            "command": f"python benchmarks/data_pathfinder.py --workers {options.workers} --blocks {options.blocks}",
            "workers": options.workers,
            "options": manifest.options,
            "examples": examples,
            "sha256": {name: spec.sha256 for name, spec in manifest.files.items() if name.endswith(".bin")},
            "seconds": round(seconds, 2),
            "limit_seconds": options.limit,
            "pictures_for_cues": options.blocks * PICTURES_PER_BLOCK,
            "accuracy_without_paths": told,
            "machine": asdict(describe()),
        }
        write_json(options.json, figures)
    return 0 if seconds <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
