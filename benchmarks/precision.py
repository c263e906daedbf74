"""Largest float32 errors over many seeds, against the equations in float64: unit-normal inputs, N=512, D=32, M=2.

An error is relative to max(1, the largest element). The gradient of a prior shared by all positions is the hardest
figure: it adds up the rounding of 262,144 pairs. Of a hard E-step the output alone is compared: where two components
nearly tie, float32 may name the other one the winner, and the gradient goes there. A learned variance is a head's or a
component's. Exits with 1 when a figure is above the bound.
"""

import argparse
import sys
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import mgk
from mgk._util.files import write_json
from mgk._util.machine import describe

LENGTH, HEAD_DIM, MIXTURES, BOUND = 512, 32, 2, 5e-6
FUNCTIONS = {"mgk": mgk.mixture_attention, "smgk": mgk.shifted_mixture_attention}
LEARNED = {"no": None, "head": (1, 1, 1, 1), "component": (1, 1, MIXTURES, 1)}


def inputs_of(variant: str, seed: int, variance: str) -> dict[str, Tensor]:
    """Unit-normal inputs that float32 can hold, and the gradient that comes from above; a variance near sqrt(D)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    per_token = (1, 1, LENGTH, HEAD_DIM)
    inputs = {"query": normal(*per_token), "value": normal(*per_token), "upstream": normal(*per_token)}
    inputs["log_prior"] = normal(1, 1, MIXTURES, 1).log_softmax(2).float().double()
    shape = LEARNED[variance]
    if shape is not None:
        inputs["variance"] = (HEAD_DIM**0.5 * (0.8 + 0.4 * torch.rand(shape, generator=generator))).double()
    if variant == "mgk":
        return inputs | {"keys": normal(1, 1, MIXTURES, LENGTH, HEAD_DIM)}
    return inputs | {"key": normal(*per_token), "shifts": normal(1, MIXTURES, HEAD_DIM)}


def run(
    variant: str, e_step: str, is_causal: bool, backend: str, inputs: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output and every gradient."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items() if name != "upstream"}
    options = {"e_step": e_step, "is_causal": is_causal, "backend": backend}
    out = FUNCTIONS[variant](**leaves, **options)  # type: ignore[operator]
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs["upstream"].to(dtype))
    found = {"output": out.detach(), **dict(zip(leaves, gradients, strict=True))}
    return found if e_step == "soft" else {"output": found["output"]}


@lru_cache(maxsize=64)
def truth_of(variant: str, e_step: str, is_causal: bool, variance: str, seed: int) -> dict[str, Tensor]:
    """The same by the equations in float64; kept for the next backend."""
    return run(variant, e_step, is_causal, "reference", inputs_of(variant, seed, variance), torch.float64)


def errors_of(
    variant: str, e_step: str, is_causal: bool, variance: str, backend: str, seeds: int
) -> dict[str, dict[str, float | int]]:
    """For the output and every gradient the largest error over the seeds, its root mean square and how many pass."""
    errors: dict[str, list[float]] = {}
    for seed in range(seeds):
        inputs = inputs_of(variant, seed, variance)
        truth = truth_of(variant, e_step, is_causal, variance, seed)
        for name, x in run(variant, e_step, is_causal, backend, inputs, torch.float32).items():
            error = (x.double() - truth[name]).abs().max() / max(1.0, truth[name].abs().max().item())
            errors.setdefault(name, []).append(error.item())
    return {
        name: {
            "largest": max(found),
            "root_mean_square": (sum(error**2 for error in found) / seeds) ** 0.5,
            "above": sum(error > BOUND for error in found),
        }
        for name, found in errors.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Largest float32 errors of every backend over many seeds.")
    parser.add_argument("--seeds", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"argument --seeds: must be at least 1, got {options.seeds}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: the directory of {str(options.json)!r} does not exist")

    rows, judged = [], []
    all_threads = torch.get_num_threads()
    backends = [name for name, status in mgk.available_backends().items() if status == "ready"]
    options_of = product(FUNCTIONS, ("soft", "hard"), (False, True), LEARNED, sorted({1, all_threads}), backends)
    for variant, e_step, is_causal, variance, threads, backend in options_of:
        if e_step == "hard" and (backend == "sdpa" or variance != "no"):
            continue
        torch.set_num_threads(threads)
        errors = errors_of(variant, e_step, is_causal, variance, backend, options.seeds)
        case = {"threads": threads, "variant": variant, "e_step": e_step, "causal": is_causal, "backend": backend}
        case["learned_variance"] = variance
        rows.append({**case, "errors": errors})
        judged.append(errors)
        name, worst = max(errors.items(), key=lambda item: item[1]["largest"])
        above = sum(found["above"] for found in errors.values())
        added = (" causal" if is_causal else "") + ("" if variance == "no" else f" learned variance of a {variance}")
        words = f"{threads} threads, {variant} {e_step}{added}, {backend}"
        print(f"{words}: largest {worst['largest']:.1e} ({name}), {above} above", flush=True)
    if options.json is not None:
        sizes = {"length": LENGTH, "head_dim": HEAD_DIM, "mixtures": MIXTURES, "seeds": options.seeds, "bound": BOUND}
        write_json(options.json, {"benchmark": "precision", **sizes, "rows": rows, "machine": asdict(describe())})
    return int(any(found["above"] for errors in judged for found in errors.values()))


if __name__ == "__main__":
    sys.exit(main())
