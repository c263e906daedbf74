"""The benchmarks and their options. Does not import torch: help is instant."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mgk.variants import DEFAULT_NUM_MIXTURES, VARIANTS

Passes = Literal["forward", "forward+backward"]

PASSES: tuple[Passes, ...] = get_args(Passes)
BACKENDS = ("reference", "eager", "blockwise", "sdpa", "cpu")
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
KERNEL_EXPERIMENTS = ("table", "causal", "padding", "unfused", "length", "decoding", "linear")
GENERATE_VARIANTS = tuple(name for name in VARIANTS if name != "softmax")
# Tokens of an example in the Long Range Arena.
TASK_LENGTHS = {"listops": 2000, "text": 4000}


def option(
    default: Any, text: str, *, least: float | None = None, most: float | None = None, choices: Sequence[str] = ()
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
    """Time and memory of each variant and backend, against softmax with twice the heads."""

    dtype: str = option("float32", f"One of {', '.join(DTYPES)}.", choices=DTYPES)
    causal: bool = option(False, "Whether query i sees only keys j <= i.")
    variants: tuple[str, ...] = option(ATTENTION_VARIANTS, "Variants.", choices=ATTENTION_VARIANTS)
    backends: tuple[str, ...] | None = option(None, "Backends; by default all.", choices=BACKENDS)
    passes: tuple[Passes, ...] = option(PASSES, "Passes.", choices=PASSES)
    memory: bool = option(True, "Whether to measure peak memory too.")
    memory_limit_gb: float = option(8.0, "'reference' is skipped where it needs more.")


@dataclass(frozen=True, kw_only=True)
class KernelsSettings(ThreadSettings):
    """The fused kernels with 4 heads against softmax with 8: tables of docs/performance.md."""

    experiments: tuple[str, ...] = option(
        KERNEL_EXPERIMENTS, "A JSON file keeps those not run.", choices=KERNEL_EXPERIMENTS
    )
    plot: Path | None = option(None, "Draw the ratio over the length to this image.")  # noqa: RUF009  a field


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

    shapes: tuple[str, ...] = option(tuple(TASK_LENGTHS), "Tasks whose lengths are drawn.", choices=tuple(TASK_LENGTHS))
    heads: tuple[int, ...] = option((1, 2, 4), "h, of the mixtures; the baselines have 2h.")
    batch: int = option(4, "Examples per step; the paper has 32.")
    mixtures: int = option(DEFAULT_NUM_MIXTURES, "M, Gaussians per key.")
    max_length: int | None = option(None, "Tokens of an example; the task's if not given.", least=2)
    attention_dropout: float = option(0.0, "The paper has 0.1, slow by SDPA on the CPU.", most=0.99)
    trainer_steps: int = option(20, "Steps in Trainer and in a bare loop; 0 skips that.", least=0)
    memory_limit_gb: float = option(8.0, "Unfused mgk is skipped where it needs more.")


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
class PicturesSettings(Settings):
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
    """One benchmark; the docstring of its settings describes it."""

    settings: type[Settings]
    entry: str  # "module:function" below mgk.bench
    columns: str  # printed fields, "field" or "heading=field"
    title: str = ""  # format of a row; rows of one title share a table
    legend: str = ""

    @property
    def description(self) -> str:
        """What it measures."""
        return self.settings.__doc__ or ""


_RATIOS = "ms=milliseconds ratio min=ratio_min max=ratio_max"
_RATIO_LEGEND = "ratio: to the baseline's time in the same round; median, min and max over rounds."

BENCHMARKS: dict[str, Benchmark] = {
    "attention": Benchmark(
        AttentionSettings,
        "attention:run",
        f"variant heads backend auto=is_auto {_RATIOS} MB=peak_extra_mb",
        "{passes}",
        f"{_RATIO_LEGEND} The baseline is softmax by torch. auto: the backend of 'auto'. MB: peak extra memory.",
    ),
    "kernels": Benchmark(
        KernelsSettings,
        "kernels:run",
        f"alternative {_RATIOS} MB=peak_extra_mb",
        "{experiment}: {passes}, B={B} N={N} D={D}",
        f"{_RATIO_LEGEND} The baseline comes first. MB: peak extra memory.",
    ),
    "roofline": Benchmark(
        RooflineSettings,
        "roofline:run",
        "operation GFLOP/s=gflop_per_second 10^9/s=giga_per_second variant ms=milliseconds"
        " products=products_milliseconds exp=exponentials_milliseconds rest=rest_milliseconds"
        " at-tile-rate=products_milliseconds_at_tile_rate at-sgemm-rate=products_milliseconds_at_sgemm_rate",
        "{experiment}",
        "products: measured, what doubling the widths of keys and values adds. exp: at the rate of torch.exp in the"
        " cache. rest: what remains. at-tile-rate, at-sgemm-rate: the products at the rates of torch's own.",
    ),
    "memory_at_length": Benchmark(
        MemorySettings, "memory_at_length:run", "peak_extra_bytes limit_bytes reference_bytes reference_score_bytes"
    ),
    "precision": Benchmark(
        PrecisionSettings,
        "precision:run",
        "threads variant e_step causal variance=learned_variance backend largest of=largest_of above",
        "",
        "largest: relative to max(1, largest element), over all seeds, of the output or of an argument's gradient."
        " above: errors above the bound.",
    ),
    "generate": Benchmark(
        GenerateSettings,
        "generate:run",
        "model heads tokens/s=tokens_per_second x-softmax=times_softmax min=times_softmax_min x-gpt2=times_gpt2"
        " min-gpt2=times_gpt2_min cache_bytes position ms/token=milliseconds",
        "{experiment}",
        "x: speed relative to that model in the same round; median and min. cache_bytes: after the last token.",
    ),
    "train": Benchmark(
        TrainSettings,
        "train:run",
        f"h=group model heads attention Trainer-ms=trainer_milliseconds bare-ms=bare_milliseconds {_RATIOS}",
        "{experiment}, {shape}",
        f"{_RATIO_LEGEND} The baseline has 2h heads: softmax by SDPA, or linear. Trainer: ratio to a bare loop.",
    ),
    "data_listops": Benchmark(ListOpsSettings, "data:listops", "seconds limit_seconds"),
    "data_pathfinder": Benchmark(
        PathfinderSettings, "data:pathfinder", "seconds limit_seconds difficulty dot_distance mean_brightness"
    ),
    "data_pictures": Benchmark(PicturesSettings, "data:pictures", "difficulty file"),
    "data_wikitext": Benchmark(
        WikiTextSettings, "data:wikitext", "words seconds words_per_second peak_bytes repeated_seconds"
    ),
}
