"""Print the tables of README.md and docs/performance.md from the rows of ``benchmarks/kernels.py``.

python benchmarks/tables.py results/bench/kernels.json
"""

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


def find(rows: list[Row], **wanted: Any) -> Row:
    return next(row for row in rows if all(row.get(key) == value for key, value in wanted.items()))


def ratios(rows: list[Row], alternatives: list[str], columns: dict[str, Row]) -> str:
    lines = [
        [name, *(f"{find(rows, alternative=name, **wanted)['ratio']:.2f}" for wanted in columns.values())]
        for name in alternatives
    ]
    return table(["", *columns], lines)


def main() -> None:
    """All tables, one after another."""
    data = json.loads(Path(sys.argv[1]).read_text())
    rows = data["rows"]
    variants = ["softmax, 8 heads, torch", *(f"{v} {e}, 4 heads" for v in ("mgk", "smgk") for e in ("soft", "hard"))]
    passes = ("forward", "forward+backward")
    print(
        ratios(
            rows,
            variants,
            {f"{p}, D={d}": {"experiment": "table", "passes": p, "D": d} for d in (32, 64) for p in passes},
        )
    )
    print()
    print(
        ratios(
            rows, variants, {f"{e}, {p}": {"experiment": e, "passes": p} for e in ("causal", "padding") for p in passes}
        )
    )
    print()
    lengths = {
        f"{p}, N={n:,}": {"experiment": "length", "passes": p, "N": n} for p in passes for n in (512, 2048, 16384)
    }
    print(ratios(rows, variants, lengths))
    print()
    memory = [
        [
            f"{n:,}",
            *(
                f"{find(rows, experiment='length', passes=passes[1], N=n, alternative=v)['peak_extra_mb']:.0f}"
                for v in variants
            ),
        ]
        for n in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    print(table(["N", *variants], memory))
    print()
    for name in ("decoding", "linear", "authors", "roofline"):
        for row in rows:
            if row["experiment"] == name:
                what = f"{name} {row.get('passes', '')}: {row['alternative']}"
                print(f"{what}: {row['milliseconds']:.1f} ms, {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
