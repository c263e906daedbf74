"""What is measured along the way: ``metrics.jsonl``, one JSON object a line, and TensorBoard events."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mgk.training.run_dir import METRICS, TENSORBOARD


class MetricsWriter:
    """Appends to the metrics of a run, from a step on; later lines, of steps that were lost, are cut off."""

    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _cut(run / METRICS, step)
        self._file: IO[str] = (run / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run / TENSORBOARD), purge_step=step + 1 if step else None)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write a line; "step" is one of the metrics."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if name != "step":
                group = "eval" if name.startswith("eval_") else "train"
                self._board.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, int(metrics["step"]))

    def close(self) -> None:
        """Close the files; what could not be written to them has been told by :meth:`write`."""
        for file in (self._file, self._board):
            with suppress(OSError):
                file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    path = run / METRICS
    if not path.is_file():
        return []
    return [line for line in map(_parsed, path.read_text(encoding="utf-8").splitlines()) if line is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:  # half a line, of a run that was killed as it wrote
        return None
    return data if isinstance(data, dict) and "step" in data else None


def _cut(path: Path, step: int) -> None:
    if not path.is_file():
        return
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)
