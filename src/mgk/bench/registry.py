"""The benchmarks and their options. Does not import torch: help is instant."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from mgk.variants import DEFAULT_NUM_MIXTURES, VARIANTS

Passes = Literal["forward", "forward+backward"]

PASSES: tuple[Passes, ...] = get_args(Passes)
BACKENDS = ("reference", "eager", "blockwise", "sdpa", "cpu", "triton")
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "xpu")
HARD = "-hard"
# Each variant, and after it the same with a hard E-step, if it has one.
ATTENTION_VARIANTS = tuple(
    name
    for spec in VARIANTS.values()
    for name in (spec.name, spec.name + HARD)
    if name in VARIANTS or (spec.is_mixture and not spec.is_linear)
)
KERNEL_EXPERIMENTS = (
    *("table", "causal", "padding", "unfused", "length", "decoding", "linear"),
    *("short", "language model", "half", "wide", "tiny", "decoded token", "window"),
)
GENERATE_VARIANTS = tuple(name for name in VARIANTS if name != "softmax")
STEP_TASKS = ("listops", "text", "retrieval", "wikitext-2")
# Tokens of an example in the Long Range Arena.
TASK_LENGTHS = {"listops": 2000, "text": 4000}


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field that is an option; a default of ``...`` makes it required.

    ``least`` is by default 0 for a float, else 1; ``choices`` hold for each item.
    """
    if least is None:
        least = 0 if isinstance(default, float) else 1
    metadata = {"help": text, "min": least, "max": most, "choices": tuple(choices)}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a benchmark."""


@dataclass(frozen=True, kw_only=True)
class ThreadSettings(Settings):
    """Options of a benchmark that computes with torch."""

    threads: int | None = option(None, "CPU threads; torch's default if not given.")


@dataclass(frozen=True, kw_only=True)
class TimedSettings(ThreadSettings):
    """Options of a benchmark that times alternatives side by side."""

    rounds: int = option(5, "How often each alternative is timed.")


@dataclass(frozen=True, kw_only=True)
class DeviceSettings(TimedSettings):
    """Options of a benchmark that runs on any device."""

    device: str = option("cpu", f"One of {', '.join(DEVICES)}; cuda:1 for the second GPU.")


@dataclass(frozen=True, kw_only=True)
class AttentionShape(Settings):
    """The sizes of one call of attention."""

    batch: int = option(2, "B.")
    heads: int = option(4, "H, heads of every variant; the softmax baseline has 2H.")
    length: int = option(2048, "N, number of queries and of keys.")
    head_dim: int = option(32, "D, width of queries, keys and values.")
    mixtures: int = option(DEFAULT_NUM_MIXTURES, "M, Gaussians per key.")


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(DeviceSettings, AttentionShape):
    """Each variant and backend against softmax with twice the heads."""

    dtype: str = option("float32", f"One of {', '.join(DTYPES)}.", choices=DTYPES)
    causal: bool = option(False, "Whether query i sees only keys j <= i.")
    variants: tuple[str, ...] = option(ATTENTION_VARIANTS, "Variants.", choices=ATTENTION_VARIANTS)
    backends: tuple[str, ...] | None = option(None, "Backends; by default all.", choices=BACKENDS)
    passes: tuple[Passes, ...] = option(PASSES, "Passes.", choices=PASSES)
    memory: bool = option(True, "Whether to measure peak memory too.")
    memory_limit_gb: float = option(8.0, "'reference' is skipped where it needs more.")


@dataclass(frozen=True, kw_only=True)
class KernelsSettings(ThreadSettings):
    """The fused kernels with 4 heads against softmax with 8."""

    experiments: tuple[str, ...] = option(
        KERNEL_EXPERIMENTS, "A JSON file keeps those not run.", choices=KERNEL_EXPERIMENTS
    )
    plot: Path | None = option(None, "Draw the ratio over the length to this image.")  # noqa: RUF009  a field


@dataclass(frozen=True, kw_only=True)
class GpuSettings(DeviceSettings):
    """The Triton kernels on a GPU: errors, then times against softmax."""

    device: str = option("cuda", "cuda, or cuda:1 for the second GPU.")
    batch: int = option(4, "B.")
    heads: int = option(8, "H, heads of every variant; the softmax baseline has 2H.")
    length: int = option(4096, "N, number of queries and of keys.")
    head_dims: tuple[int, ...] = option((64, 128), "D.")
    dtypes: tuple[str, ...] = option(("float16", "bfloat16"), "Dtypes.", choices=DTYPES[1:])
    rounds: int = option(20, "How often each alternative is timed.")


@dataclass(frozen=True, kw_only=True)
class RooflineSettings(TimedSettings, AttentionShape):
    """The forward of mgk and smgk by parts, beside what the machine can do."""

    rounds: int = option(15, "How often each alternative is timed.")
    matrix: int = option(2048, "Rows and columns of the large square matrices.")


@dataclass(frozen=True, kw_only=True)
class MemorySettings(ThreadSettings, AttentionShape):
    """Peak extra memory of one long call of blockwise mgk, against a limit."""

    batch: int = option(1, "B.")
    heads: int = option(1, "H.")
    length: int = option(32768, "N.")
    limit_gb: float = option(1.5, "In 10^9 bytes; more is a failure.")


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(ThreadSettings):
    """Largest float32 errors of every backend against float64, by threads."""

    seeds: int = option(64, "Random inputs of each case.")
    length: int = option(512, "N.")
    bound: float = option(5e-6, "A larger error is a failure.")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(DeviceSettings):
    """Tokens per second and cache size, against softmax and Hugging Face's GPT-2."""

    batch: int = option(4, "Sequences.")
    prompt: int = option(1536, "Tokens in the cache before the clock starts.")
    tokens: int = option(512, "Tokens generated while it runs.")
    variants: tuple[str, ...] = option(("smgk", "mgk"), "Variants to measure.", choices=GENERATE_VARIANTS)
    layers: int = option(8, "Layers of every model.")
    width: int = option(256, "Hidden size; the feed-forward network has four times as much.")
    head_dim: int = option(32, "D, of every model.")
    heads: int = option(4, "H, of the variants; softmax and GPT-2 fill the width.")
    mixtures: int = option(DEFAULT_NUM_MIXTURES, "M, Gaussians per key.")
    vocab_size: int = option(256, "Vocabulary of every model.", least=2)
    positions: tuple[int, ...] = option(
        (1_000, 2_000, 5_000, 10_000, 20_000), "Where a token of mlk is timed; '' skips that."
    )
    position_tokens: int = option(64, "Tokens decoded at each position.")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(TimedSettings):
    """Optimizer steps: mixtures with h heads against softmax and linear with 2h."""

    shapes: tuple[str, ...] = option(
        tuple(TASK_LENGTHS), "Tasks whose lengths are drawn.", choices=tuple(TASK_LENGTHS)
    )
    heads: tuple[int, ...] = option((1, 2, 4), "h, of the mixtures; the baselines have 2h.")
    batch: int = option(4, "Examples per step; the paper has 32.")
    mixtures: int = option(DEFAULT_NUM_MIXTURES, "M, Gaussians per key.")
    max_length: int | None = option(None, "Tokens of an example; the task's if not given.", least=2)
    attention_dropout: float = option(0.0, "The paper has 0.1, slow by SDPA on the CPU.", most=0.99)
    loop_steps: int = option(20, "Steps of the training loop and of a bare one; 0 skips that.", least=0)
    memory_limit_gb: float = option(8.0, "Unfused mgk is skipped where it needs more.")


@dataclass(frozen=True, kw_only=True)
class StepsSettings(TimedSettings):
    """Training steps of the laptop recipes by parts; packed rows against padded ones."""

    rounds: int = option(20, "Steps of each.")
    tasks: tuple[str, ...] = option(STEP_TASKS, "Recipes.", choices=STEP_TASKS)
    attention: str = option("smgk", "Variant.", choices=tuple(VARIANTS))
    heads: int = option(1, "H, of all but the language model.")
    packing: bool = option(True, "Whether to measure packed rows.")


@dataclass(frozen=True, kw_only=True)
class ListOpsSettings(Settings):
    """Time to generate the full ListOps set, against a limit."""

    workers: int = option(2, "Processes.")
    limit_seconds: float = option(600.0, "More is a failure.")


@dataclass(frozen=True, kw_only=True)
class PathfinderSettings(ListOpsSettings):
    """Time to draw the full Pathfinder set; accuracy of cues that follow no path."""

    blocks: int = option(40, "Blocks of images that the cues are tested on.")


@dataclass(frozen=True, kw_only=True)
class ImagesSettings(Settings):
    """The sample images of docs/data.md: connected above, not connected below."""

    out: Path = option(Path("docs/images"), "Folder of the images.")  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class WikiTextSettings(Settings):
    """Words per second and memory of preparing a text of WikiText-103's size."""

    source: Path = option(..., "WikiText-2, its folder or archive.")  # noqa: RUF009
    times: int = option(50, "How often the training text is repeated.")
    min_words_per_second: float = option(1e6, "Fewer is a failure.")
    limit_gb: float = option(2.0, "Peak memory of the process in 10^9 bytes; more is a failure.")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark; ``tables.toml`` has its columns, title and legend."""

    settings: type[Settings]
    entry: str  # "module:function" below mgk.bench
    columns: str  # printed fields, "field" or "heading=field"
    title: str = ""  # format of a row; rows of one title share a table
    legend: str = ""

    @property
    def description(self) -> str:
        """What it measures."""
        return self.settings.__doc__ or ""


_TABLES = tomllib.loads((resources.files("mgk.bench") / "tables.toml").read_text("utf-8"))

BENCHMARKS: dict[str, Benchmark] = {
    name: Benchmark(settings, entry, **_TABLES[name])
    for name, settings, entry in (
        ("attention", AttentionSettings, "variants_by_backend:run"),
        ("kernels", KernelsSettings, "kernels:run"),
        ("gpu", GpuSettings, "gpu:run"),
        ("roofline", RooflineSettings, "roofline:run"),
        ("memory_at_length", MemorySettings, "memory_at_length:run"),
        ("precision", PrecisionSettings, "precision:run"),
        ("generate", GenerateSettings, "generate:run"),
        ("train", TrainSettings, "train:run"),
        ("steps", StepsSettings, "steps:run"),
        ("data_listops", ListOpsSettings, "data:listops"),
        ("data_pathfinder", PathfinderSettings, "data:pathfinder"),
        ("data_images", ImagesSettings, "data:images"),
        ("data_wikitext", WikiTextSettings, "data:wikitext"),
    )
}
