"""Time to generate the full ListOps set, 96,000/2,000/2,000, against a limit.

Exits with 1 when it takes longer than the limit.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk._util.progress import Progress
from mgk.data import prepare


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to generate the full ListOps set.")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="in seconds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Progress("data_listops") as on_step:
        start = time.perf_counter()
        ready = prepare("listops", out=Path(folder), workers=options.workers, on_step=on_step)
        seconds = time.perf_counter() - start
    manifest = ready.manifest
    examples = {split: manifest.examples(split) for split in manifest.splits}
    print(f"listops {examples} by {options.workers} processes: {seconds:.1f} s, limit {options.limit:g} s")
    if options.json is not None:
        figures = {
            "benchmark": "data_listops",
            "command": f"python benchmarks/data_listops.py --workers {options.workers}",
            "workers": options.workers,
            "options": manifest.options,
            "examples": examples,
            "tokens": {split: arrays["tokens"].shape[0] for split, arrays in manifest.splits.items()},
            "sha256": {name: spec.sha256 for name, spec in manifest.files.items() if name.endswith(".bin")},
            "seconds": round(seconds, 2),
            "limit_seconds": options.limit,
            "machine": asdict(describe()),
        }
        write_json(options.json, figures)
    return 0 if seconds <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
