"""What the fused kernels cost against softmax attention with twice the heads: rows as JSON, and a plot of the ratio.

    python benchmarks/kernels.py --json FILE [--plot PICTURE] [--only NAME ...]

Every experiment times its alternatives interleaved in one process, in float32 on two threads, M = 2. The yardstick of
each, 1.00, is ``scaled_dot_product_attention``; that of "linear" is our own linear attention with the same heads.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mgk
from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk.bench.memory import peak_extra_bytes
from mgk.bench.timing import compare

HEADS, MIXTURES, THREADS = 4, 2, 2
YARDSTICK = "softmax, 8 heads, torch"


@dataclass(frozen=True)
class Experiment:
    """Alternatives to time side by side."""

    name: str
    setting: dict[str, Any]
    alternatives: dict[str, Callable[[], object]]
    rounds: int
    with_memory: bool = False


def work(function: Callable[..., Any], inputs: list[Tensor], backward: bool) -> Callable[[], object]:
    """The forward without a graph, or the forward and the gradients of all inputs."""
    leaves = [x.clone().requires_grad_(backward) for x in inputs]

    def run() -> object:
        if not backward:
            with torch.no_grad():
                return function(*leaves)
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def authors_formulation(query: Tensor, keys: Tensor, value: Tensor, log_prior: Tensor) -> Tensor:
    """Eq. 9 as it is usually written: M matrices of exponentials, mixed and normalised."""
    mass = torch.zeros(())
    for r in range(keys.shape[2]):
        distance = torch.cdist(query, keys[:, :, r]).square()
        mass = mass + log_prior[:, r, None, None].exp() * torch.exp(-distance / (2 * math.sqrt(query.shape[-1])))
    return mass / mass.sum(-1, keepdim=True) @ value


def softmax_and_ours(
    name: str,
    batch: int,
    length: int,
    width: int,
    backward: bool,
    rounds: int,
    padded: float = 0.0,
    causal: bool = False,
) -> Experiment:
    """Softmax with 8 heads against mgk and smgk with 4, soft and hard."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape)

    query8, key8, value8 = (normal(batch, 2 * HEADS, length, width) for _ in range(3))
    query, key, value = (normal(batch, HEADS, length, width) for _ in range(3))
    keys, shifts = normal(batch, HEADS, MIXTURES, length, width), normal(HEADS, MIXTURES, width)
    prior = normal(HEADS, MIXTURES).log_softmax(-1)
    mask = (torch.arange(length) < length * (1 - padded))[None, None, None] if padded else None
    options: dict[str, Any] = {"is_causal": causal, "attn_mask": mask, "backend": "cpu"}

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    def mixture(e_step: str) -> Callable[..., Tensor]:
        return lambda q, k, v, p: mgk.mixture_attention(q, k, v, p[None, :, :, None], e_step=e_step, **options)  # type: ignore[arg-type]

    def shifted(e_step: str) -> Callable[..., Tensor]:
        return lambda q, k, s, v, p: mgk.shifted_mixture_attention(q, k, s, v, p, e_step=e_step, **options)  # type: ignore[arg-type]

    alternatives = {YARDSTICK: work(softmax, [query8, key8, value8], backward)}
    for e_step in ("soft", "hard"):
        alternatives[f"mgk {e_step}, 4 heads"] = work(mixture(e_step), [query, keys, value, prior], backward)
        alternatives[f"smgk {e_step}, 4 heads"] = work(shifted(e_step), [query, key, shifts, value, prior], backward)
    if name == "authors":
        ours = "mgk soft, 4 heads"
        usual = work(authors_formulation, [query, keys, value, prior], backward)
        alternatives = {YARDSTICK: alternatives[YARDSTICK], ours: alternatives[ours], "mgk as usually written": usual}
    passes = "forward+backward" if backward else "forward"
    setting = {"B": batch, "N": length, "D": width, "passes": passes, "padded": padded, "causal": causal}
    return Experiment(name, setting, alternatives, rounds, with_memory=name == "length")


def decoding() -> Experiment:
    """One query against 8,192 cached tokens, B = 4, D = 64: beyond the CPU's cache."""
    batch, length, width = 4, 8192, 64

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape)

    query8, query = normal(batch, 2 * HEADS, 1, width), normal(batch, HEADS, 1, width)
    key8, value8 = normal(batch, 2 * HEADS, length, width), normal(batch, 2 * HEADS, length, width)
    key, value = normal(batch, HEADS, length, width), normal(batch, HEADS, length, width)
    keys, shifts = normal(batch, HEADS, MIXTURES, length, width), normal(HEADS, MIXTURES, width)
    alternatives = {
        YARDSTICK: work(scaled_dot_product_attention, [query8, key8, value8], False),
        "mgk soft, 4 heads": work(lambda q, k, v: mgk.mixture_attention(q, k, v), [query, keys, value], False),
        "smgk soft, 4 heads": work(
            lambda q, k, s, v: mgk.shifted_mixture_attention(q, k, s, v), [query, key, shifts, value], False
        ),
    }
    return Experiment("decoding", {"B": batch, "N": length, "D": width, "passes": "forward"}, alternatives, 60)


def linear(*, against_smgk: bool) -> Experiment:
    """Causal mlk at N = 16,384, or smgk, against our own linear attention with the same heads.

    Not all three in turn: whatever follows the second that smgk takes is slowed down by it.
    """
    batch, length, width = 1, 16384, 32
    query, key, value = (torch.randn(batch, HEADS, length, width) for _ in range(3))
    keys, shifts = torch.randn(batch, HEADS, MIXTURES, length, width), torch.randn(HEADS, MIXTURES, width)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return mgk.linear_mixture_attention(q, k, v, is_causal=True)

    def attend_smgk(q: Tensor, k: Tensor, b: Tensor, v: Tensor) -> Any:
        return mgk.shifted_mixture_attention(q, k, b, v, is_causal=True)

    alternatives = {"linear, 4 heads": work(attend, [query, key.unsqueeze(2), value], True)}
    if against_smgk:
        alternatives["smgk soft, 4 heads"] = work(attend_smgk, [query, key, shifts, value], True)
    else:
        alternatives["mlk, 4 heads"] = work(attend, [query, keys, value], True)
    setting = {"B": batch, "N": length, "D": width, "passes": "forward+backward", "causal": True}
    return Experiment("linear", setting, alternatives, 9 if against_smgk else 41)


def roofline() -> Experiment:
    """What the machine can do: a large matrix product (2 * 2048^3 operations), and 2^24 exponentials by torch."""
    a, b, x = torch.randn(2048, 2048), torch.randn(2048, 2048), torch.randn(2**24)
    alternatives: dict[str, Callable[[], object]] = {
        "sgemm of 2048^3": lambda: a @ b,
        "2^24 exponentials": lambda: x.exp(),
    }
    return Experiment("roofline", {}, alternatives, 15)


def experiments() -> Iterator[tuple[str, Callable[[], Experiment]]]:
    """All of them by name, made when their turn comes."""
    for width in (32, 64):
        for backward in (False, True):
            yield "table", lambda w=width, b=backward: softmax_and_ours("table", 2, 2048, w, b, 15)  # type: ignore[misc]
    for backward in (False, True):
        yield "causal", lambda b=backward: softmax_and_ours("causal", 2, 2048, 32, b, 11, causal=True)  # type: ignore[misc]
        yield "padding", lambda b=backward: softmax_and_ours("padding", 2, 2048, 32, b, 11, padded=0.5)  # type: ignore[misc]
        yield "authors", lambda b=backward: softmax_and_ours("authors", 2, 2048, 32, b, 3)  # type: ignore[misc]
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        rounds = max(2, min(15, 2**17 // length // 4))
        for backward in (False, True):
            yield "length", lambda n=length, b=backward, r=rounds: softmax_and_ours("length", 1, n, 32, b, r)  # type: ignore[misc]
    yield "decoding", decoding
    yield "linear", partial(linear, against_smgk=False)
    yield "linear", partial(linear, against_smgk=True)
    yield "roofline", roofline


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The ratio over the length, a line for each variant and pass."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, passes in zip(axes, ("forward", "forward+backward"), strict=True):
        of_pass = [row for row in rows if row["experiment"] == "length" and row["passes"] == passes]
        for name in dict.fromkeys(row["alternative"] for row in of_pass):
            points = [(row["N"], row["ratio"]) for row in of_pass if row["alternative"] == name]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(xscale="log", xlabel="length N", title=passes, ylim=(0, 1.2))
        axis.set_xticks([512, 1024, 2048, 4096, 8192, 16384], ["512", "1k", "2k", "4k", "8k", "16k"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time / softmax with 8 heads")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the experiments, print a line for each row, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, required=True, help="where the rows go; rows of experiments not run are kept"
    )
    parser.add_argument("--plot", type=Path, help="a picture of the ratio over the length")
    names = list(dict.fromkeys(name for name, _ in experiments()))
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    device = torch.device("cpu")
    old = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else []
    chosen = [(name, make) for name, make in experiments() if not arguments.only or name in arguments.only]
    rows = [row for row in old if row["experiment"] not in {name for name, _ in chosen}]
    for number, (name, make) in enumerate(chosen):
        experiment = make()
        first = next(iter(experiment.alternatives))
        timings = compare(experiment.alternatives, first, rounds=experiment.rounds, device=device)
        print(f"{number + 1} of {len(chosen)}: {name} {experiment.setting}", flush=True)
        for alternative, timing in timings.items():
            row: dict[str, Any] = {
                "experiment": name,
                **experiment.setting,
                "alternative": alternative,
                **asdict(timing),
            }
            if experiment.with_memory:
                peak = peak_extra_bytes(experiment.alternatives[alternative], device)
                row["peak_extra_mb"] = None if peak is None else peak / 1e6
            rows.append(row)
            print(f"    {alternative:50}{timing.milliseconds:10.1f} ms {timing.ratio:7.2f}"
                  f"  [{timing.ratio_min:.2f}, {timing.ratio_max:.2f}]", flush=True)  # fmt: skip
    write_json(arguments.json, {"benchmark": "kernels", "machine": asdict(describe(device)), "rows": rows})
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
