"""Time to prepare data sets, against limits; sample images."""

import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mgk._util.machine import peak_process_bytes
from mgk.bench.registry import ImagesSettings, ListOpsSettings, PathfinderSettings, WikiTextSettings
from mgk.bench.runner import OnStep, Outcome, Row
from mgk.data import prepare
from mgk.data.pathfinder import DIFFICULTIES, IMAGES_PER_BLOCK, draw
from mgk.data.sources import Source

_COLUMNS, _ZOOM = 6, 3


def listops(settings: ListOpsSettings, on_step: OnStep) -> Outcome:
    """One row: time, and the ``options``, sizes and ``sha256`` of the set."""
    return _generation("listops", settings, on_step)


def pathfinder(settings: PathfinderSettings, on_step: OnStep) -> Outcome:
    """The generation, then the accuracy of cues that follow no path."""
    outcome = _generation("pathfinder", settings, on_step)
    rows = list(outcome.rows)
    for difficulty in DIFFICULTIES:
        blocks = [draw(1, number, difficulty) for number in range(settings.blocks)]
        images = np.concatenate([block.images for block in blocks])
        labels = np.concatenate([block.labels for block in blocks])
        cues = {
            "dot_distance": np.array([dot_distance(image) for image in images]),
            "mean_brightness": images.mean((1, 2)),
        }
        accuracies = {name: round(threshold_accuracy(cue, labels), 4) for name, cue in cues.items()}
        count = settings.blocks * IMAGES_PER_BLOCK
        rows.append({"difficulty": difficulty, "images": count, **accuracies})
    return Outcome(rows, failures=outcome.failures)


def dot_distance(image: NDArray[np.uint8]) -> float:
    """Largest distance of two of the brightest pixels, which are the dots."""
    bright = np.argwhere(image == image.max())
    return float(np.linalg.norm(bright[:, None] - bright, axis=-1).max())


def threshold_accuracy(cue: NDArray[np.float64], labels: NDArray[np.uint8]) -> float:
    """Accuracy on the second half of the threshold that is best on the first."""
    half = len(cue) // 2
    thresholds = np.unique(cue[:half])
    guesses = cue[:half] <= thresholds[:, None]
    right = (guesses == labels[:half]).mean(1)
    best = int(np.argmax(np.abs(right - 0.5)))
    share = float(((cue[half:] <= thresholds[best]) == labels[half:]).mean())
    return share if right[best] >= 0.5 else 1 - share


def images(settings: ImagesSettings, on_step: OnStep) -> Outcome:
    """One row per image: ``difficulty`` and ``file``."""
    rows: list[Row] = []
    for difficulty in DIFFICULTIES:
        block, lines = draw(0, 0, difficulty), []
        for label in (1, 0):
            shown = block.images[block.labels == label][:_COLUMNS]
            framed = [np.pad(image, 1, constant_values=128) for image in shown]
            lines.append(np.concatenate(framed, 1))
        path = settings.out / f"pathfinder_{difficulty}.png"
        Image.fromarray(np.concatenate(lines).repeat(_ZOOM, 0).repeat(_ZOOM, 1)).save(path)
        rows.append({"difficulty": difficulty, "file": str(path)})
        on_step(len(rows), len(DIFFICULTIES))
    return Outcome(rows)


def wikitext(settings: WikiTextSettings, on_step: OnStep) -> Outcome:
    """One row; a second call must find the set prepared."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = _write_repeated(settings.source, folder, settings.times)
        before = peak_process_bytes()
        start = time.perf_counter()
        prepared = prepare("wikitext-2", folder, out=folder / "out", on_step=on_step)
        middle = time.perf_counter()
        is_prepared_again = prepare("wikitext-2", folder, out=folder / "out").is_new
        end = time.perf_counter()
    peak, limit = peak_process_bytes(), round(settings.limit_gb * 1e9)
    rate = words / (middle - start)
    checks = {
        f"{rate:,.0f} words per second are below the limit": rate < settings.min_words_per_second,
        f"peak memory of the process is {peak:,} bytes, above the limit": peak > limit,
        "the second call prepared the set again": is_prepared_again,
    }
    row = {
        "words": words,
        "vocabulary": prepared.manifest.facts["vocab_size"],
        "seconds": round(middle - start, 2),
        "words_per_second": round(rate),
        "peak_bytes": peak,
        "peak_bytes_before": before,
        "limit_bytes": limit,
        "repeated_seconds": round(end - middle, 5),
    }
    return Outcome([row], failures=[text for text, is_missed in checks.items() if is_missed])


def _generation(task: str, settings: ListOpsSettings, on_step: OnStep) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = prepare(task, out=folder, workers=settings.workers, on_step=on_step)
        seconds = time.perf_counter() - start
    manifest = done.manifest
    arrays = [name for name in manifest.files if name.endswith(".bin")]
    row = {
        "seconds": round(seconds, 2),
        "limit_seconds": settings.limit_seconds,
        "options": dict(manifest.options),
        "examples": {split: manifest.examples(split) for split in manifest.splits},
        "tokens": {name: split["tokens"].shape[0] for name, split in manifest.splits.items()},
        "sha256": {name: manifest.files[name].sha256 for name in arrays},
    }
    is_late = seconds > settings.limit_seconds
    return Outcome([row], failures=[f"{seconds:.1f} s are above the limit"] if is_late else [])


def _write_repeated(archive: Path, folder: Path, times: int) -> int:
    """Write the three files, the training text repeated; the number of words."""
    words = 0
    for file in Source(archive).files(r"wiki\.(train|valid|test)\.tokens"):
        text, repeats = file.content(), times if file.match[1] == "train" else 1
        with (folder / Path(file.name).name).open("wb") as out:
            for _ in range(repeats):
                out.write(text)
        words += repeats * len(text.split())
    return words
