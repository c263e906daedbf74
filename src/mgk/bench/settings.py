"""What can be measured, by name. Free of torch, so that the command line can check its options at once."""

from dataclasses import dataclass
from typing import Literal, get_args

Passes = Literal["forward", "forward+backward"]

VARIANTS = ("softmax", "mgk", "mgk-hard", "smgk", "smgk-hard", "linear", "mlk", "smlk")
BACKENDS = ("reference", "eager", "blockwise", "sdpa", "cpu")
PASSES: tuple[Passes, ...] = get_args(Passes)
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The shapes and options of one attention benchmark.

    Attributes:
        batch: B.
        heads: H, the heads of every variant; the yardstick, softmax, has 2H.
        length: N, queries and keys alike.
        head_dim: D, of queries, keys and values.
        mixtures: M.
        dtype: one of ``DTYPES``.
        device: "cpu", "cuda", "cuda:1", ...
        causal: whether query i sees the keys j <= i only.
        threads: of the CPU; None leaves them as torch has them.
        rounds: how often each alternative is timed.
        variants: some of ``VARIANTS``.
        backends: some of ``BACKENDS``; None takes all that are ready.
        passes: some of ``PASSES``.
        memory: whether to measure peak memory too.
        memory_limit_gb: ``reference`` is left out where it would need more than this (10^9 bytes).
    """

    batch: int = 2
    heads: int = 4
    length: int = 2048
    head_dim: int = 32
    mixtures: int = 2
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = False
    threads: int | None = None
    rounds: int = 5
    variants: tuple[str, ...] = VARIANTS
    backends: tuple[str, ...] | None = None
    passes: tuple[Passes, ...] = PASSES
    memory: bool = True
    memory_limit_gb: float = 8.0
