"""Words a second and peak memory of preparing a text of WikiText-103's size: WikiText-2's, many times over.

The time is that of the whole preparation: hashing the files, reading, vocabulary, encoding, writing, and bringing it
to the disk. Exits with 1 when a limit is missed.
"""

import argparse
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk.data import prepare
from mgk.data.sources import Source


def lay_out(archive: Path, folder: Path, times: int) -> int:
    """Write the three files, the training text ``times`` times over; the number of their words."""
    words = 0
    for file in Source(archive).files(r"wiki\.(train|valid|test)\.tokens"):
        text, repeated = file.read(), times if file.match[1] == "train" else 1
        with (folder / Path(file.name).name).open("wb") as out:
            for _ in range(repeated):
                out.write(text)
        words += repeated * len(text.split())
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description="Words a second and peak memory of preparing WikiText.")
    parser.add_argument("--source", type=Path, required=True, help="WikiText-2, its folder or archive")
    parser.add_argument("--times", type=int, default=50, help="of the training text (default: %(default)s)")
    parser.add_argument("--least", type=float, default=1e6, help="words a second (default: %(default)g)")
    parser.add_argument("--limit-gb", type=float, default=2.0, help="in 10^9 bytes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        words = lay_out(options.source, folder, options.times)
        before = peak_bytes()
        start = time.perf_counter()
        ready = prepare("wikitext-2", folder, out=folder / "out")
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        is_instant = not prepare("wikitext-2", folder, out=folder / "out").is_new
        again = time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
    peak, rate = peak_bytes(), words / seconds
    print(
        f"{words:,} words in {seconds:.1f} s: {rate:,.0f} words a second (at least {options.least:,.0f});"
        f" peak memory of the process {peak / 1e9:.2f} GB (limit {options.limit_gb:g}); a second time {again:.4f} s"
    )
    if options.json is not None:
        figures = {
            "benchmark": "data_wikitext",
            "command": f"python benchmarks/data_wikitext.py --source WIKITEXT-2 --times {options.times}",
            "words": words,
            "vocabulary": ready.manifest.facts["vocab_size"],
            "seconds": round(seconds, 2),
            "words_per_second": round(rate),
            "least_words_per_second": round(options.least),
            "peak_bytes": peak,
            "peak_bytes_before": before,
            "limit_bytes": round(options.limit_gb * 1e9),
            "seconds_of_a_second_time": round(again, 5),
            "machine": asdict(describe()),
        }
        write_json(options.json, figures)
    return 0 if rate >= options.least and peak <= options.limit_gb * 1e9 and is_instant else 1


def peak_bytes() -> int:
    """The most memory that the process has had, libraries included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())
