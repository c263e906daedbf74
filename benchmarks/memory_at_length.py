"""Peak extra memory of a long forward and backward by the blockwise backend, against a limit.

Exits with 1 when the figure is above the limit or cannot be measured.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from mgk import mixture_attention
from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk.bench.attention import reference_bytes
from mgk.bench.memory import peak_extra_bytes
from mgk.bench.settings import Settings

HEAD_DIM, MIXTURES = 32, 2


def forward_and_backward(length: int) -> Callable[[], object]:
    """What is to be measured; its inputs exist before it runs."""
    query, value = (torch.randn(1, 1, length, HEAD_DIM, requires_grad=True) for _ in range(2))
    keys = torch.randn(1, 1, MIXTURES, length, HEAD_DIM, requires_grad=True)
    log_prior = torch.randn(1, 1, MIXTURES, 1).log_softmax(2).requires_grad_()
    leaves = (query, keys, value, log_prior)

    def run() -> object:
        return torch.autograd.grad(mixture_attention(query, keys, value, log_prior, backend="blockwise").sum(), leaves)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak extra memory of blockwise attention, forward and backward.")
    parser.add_argument("--length", type=int, default=32768, help="N (default: %(default)s)")
    parser.add_argument("--limit-gb", type=float, default=1.5, help="in 10^9 bytes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options = parser.parse_args()
    if options.length < 1:
        parser.error(f"argument --length: must be at least 1, got {options.length}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: the directory of {str(options.json)!r} does not exist")

    forward_and_backward(min(options.length, 256))()  # fills the caches of threads and libraries
    peak = peak_extra_bytes(forward_and_backward(options.length), torch.device("cpu"))
    scores = MIXTURES * options.length**2 * 4
    sizes = Settings(batch=1, heads=1, length=options.length, head_dim=HEAD_DIM, mixtures=MIXTURES)
    reference = reference_bytes("mgk", sizes)
    is_within = peak is not None and peak <= options.limit_gb * 1e9
    figure = "n/a" if peak is None else f"{peak / 1e9:.3f} GB"
    print(
        f"blockwise forward+backward at N={options.length} (B=1 H=1 D={HEAD_DIM} M={MIXTURES} float32):"
        f" peak extra memory {figure}, limit {options.limit_gb:g} GB;"
        f" reference would need about {reference / 1e9:.1f} GB, {scores / 1e9:.1f} GB for its scores alone"
    )
    if options.json is not None:
        figures = {
            "benchmark": "memory_at_length",
            "length": options.length,
            "head_dim": HEAD_DIM,
            "mixtures": MIXTURES,
            "peak_extra_bytes": peak,
            "limit_bytes": round(options.limit_gb * 1e9),
            "reference_score_bytes": scores,
            "reference_bytes": reference,
            "machine": asdict(describe()),
        }
        write_json(options.json, figures)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
