"""``mgk bench``: what attention, generation and training cost on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mgk.bench.generate_settings import VARIANTS as GENERATE_VARIANTS
from mgk.bench.generate_settings import GenerateSettings
from mgk.bench.settings import BACKENDS, DEVICES, DTYPES, PASSES, VARIANTS, Passes, Settings
from mgk.bench.train_settings import SHAPES, TrainSettings
from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import device as check_device
from mgk.cli.options import one_of, some_of, split, whole_numbers, writable_file

if TYPE_CHECKING:
    from rich.table import Table

    from mgk.bench.generate import GenerateReport
    from mgk.bench.report import Report
    from mgk.bench.train import TrainReport

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure time and memory on this machine.")
_DEFAULT = Settings()
_GENERATE = GenerateSettings()
_TRAIN = TrainSettings()


@app.callback()
def bench() -> None:
    """Measure time and memory on this machine."""


@app.command()
def attention(
    batch: Annotated[int, typer.Option(min=1, help="B.")] = _DEFAULT.batch,
    heads: Annotated[
        int, typer.Option(min=1, help="H, of every variant; the yardstick, softmax, has twice as many.")
    ] = _DEFAULT.heads,
    length: Annotated[int, typer.Option(min=1, help="N, queries and keys alike.")] = _DEFAULT.length,
    head_dim: Annotated[int, typer.Option(min=1, help="D, of queries, keys and values.")] = _DEFAULT.head_dim,
    mixtures: Annotated[int, typer.Option(min=1, help="M, Gaussians per key.")] = _DEFAULT.mixtures,
    dtype: Annotated[str, typer.Option(callback=one_of(DTYPES), help=f"One of {', '.join(DTYPES)}.")] = _DEFAULT.dtype,
    device: Annotated[
        str,
        typer.Option(callback=check_device(DEVICES), help=f"One of {', '.join(DEVICES)}; cuda:1 for the second."),
    ] = _DEFAULT.device,
    causal: Annotated[bool, typer.Option(help="Whether query i sees the keys j <= i only.")] = _DEFAULT.causal,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU; torch's own choice if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each alternative is timed.")] = _DEFAULT.rounds,
    variants: Annotated[
        str,
        typer.Option(callback=some_of(VARIANTS), help=f"Some of {','.join(VARIANTS)}.", show_default="all"),
    ] = ",".join(VARIANTS),
    backends: Annotated[
        str | None,
        typer.Option(
            callback=some_of(BACKENDS),
            help=f"Some of {','.join(BACKENDS)}.",
            show_default="all that are ready",
        ),
    ] = None,
    passes: Annotated[
        str, typer.Option(callback=some_of(PASSES), help=f"Some of {','.join(PASSES)}.", show_default="all")
    ] = ",".join(PASSES),
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Whether to measure peak memory too.")] = True,
    memory_limit: Annotated[
        float, typer.Option(min=0.0, help="In GB: 'reference' is left out where it would need more.")
    ] = _DEFAULT.memory_limit_gb,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable_file, help="Write the figures to this file too."),
    ] = None,
) -> None:
    """Time each variant of attention on each backend, side by side with softmax of twice the heads."""
    settings = Settings(
        batch=batch,
        heads=heads,
        length=length,
        head_dim=head_dim,
        mixtures=mixtures,
        dtype=dtype,
        device=device,
        causal=causal,
        threads=threads,
        rounds=rounds,
        variants=split(variants),
        backends=None if backends is None else split(backends),
        passes=cast("tuple[Passes, ...]", split(passes)),
        memory=memory,
        memory_limit_gb=memory_limit,
    )
    with cli_errors():
        # Imports torch, which takes a second or more: only once the options are known to be right.
        from mgk._util.progress import Progress
        from mgk.bench import attention as benchmark

        with Progress("bench attention") as on_step:
            report = benchmark.run(settings, on_step)
        _show(report)
        _write(report.to_json(), json)


@app.command()
def generate(
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = _GENERATE.batch,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before the clock starts.")] = _GENERATE.prompt,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens generated while it runs.")] = _GENERATE.tokens,
    layers: Annotated[int, typer.Option(min=1, help="Of every model.")] = _GENERATE.layers,
    width: Annotated[int, typer.Option(min=1, help="Of every model.")] = _GENERATE.width,
    head_dim: Annotated[int, typer.Option(min=1, help="D, of every model.")] = _GENERATE.head_dim,
    heads: Annotated[
        int, typer.Option(min=1, help="H, of the variants; softmax and GPT-2 have as many as fill the width.")
    ] = _GENERATE.heads,
    mixtures: Annotated[int, typer.Option(min=1, help="M, Gaussians per key.")] = _GENERATE.mixtures,
    vocab_size: Annotated[int, typer.Option(min=2, help="Of every model.")] = _GENERATE.vocab_size,
    variants: Annotated[
        str, typer.Option(callback=some_of(GENERATE_VARIANTS), help=f"Some of {','.join(GENERATE_VARIANTS)}.")
    ] = ",".join(_GENERATE.variants),
    positions: Annotated[
        str,
        typer.Option(callback=whole_numbers, help="Where the time for a token of mlk is measured; '' leaves it out."),
    ] = ",".join(map(str, _GENERATE.positions)),
    device: Annotated[
        str,
        typer.Option(callback=check_device(DEVICES), help=f"One of {', '.join(DEVICES)}; cuda:1 for the second."),
    ] = _GENERATE.device,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU; torch's own choice if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each alternative is timed.")] = _GENERATE.rounds,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable_file, help="Write the figures to this file too."),
    ] = None,
) -> None:
    """Time the decoding of language models, side by side with softmax attention and Hugging Face's GPT-2."""
    settings = GenerateSettings(
        batch=batch,
        prompt=prompt,
        tokens=tokens,
        layers=layers,
        width=width,
        head_dim=head_dim,
        heads=heads,
        mixtures=mixtures,
        vocab_size=vocab_size,
        variants=split(variants),
        positions=tuple(int(part) for part in split(positions)),
        device=device,
        threads=threads,
        rounds=rounds,
    )
    with cli_errors():
        from mgk._util.progress import Progress
        from mgk.bench import generate as benchmark

        with Progress("bench generate") as on_step:
            report = benchmark.run(settings, on_step)
        _show_generation(report)
        _write(report.to_json(), json)


@app.command()
def train(
    shapes: Annotated[
        str, typer.Option(callback=some_of(SHAPES), help=f"Some of {','.join(SHAPES)}, of the Long Range Arena.")
    ] = ",".join(_TRAIN.shapes),
    heads: Annotated[
        str, typer.Option(callback=whole_numbers, help="h, of the mixtures; softmax and linear have twice as many.")
    ] = ",".join(map(str, _TRAIN.heads)),
    batch: Annotated[int, typer.Option(min=1, help="Examples of a step; the paper has 32.")] = _TRAIN.batch,
    mixtures: Annotated[int, typer.Option(min=1, help="M, Gaussians per key.")] = _TRAIN.mixtures,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Where examples are cut.", show_default="2000 and 4000")
    ] = None,
    attention_dropout: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="The paper has 0.1, which SDPA has no fast path for on the CPU.")
    ] = _TRAIN.attention_dropout,
    trainer_steps: Annotated[
        int, typer.Option(min=0, help="Steps timed for what Trainer adds to a bare loop; 0 leaves that out.")
    ] = _TRAIN.trainer_steps,
    memory_limit: Annotated[
        float, typer.Option(min=0.0, help="In GB: mgk as usually written is left out where it would need more.")
    ] = _TRAIN.memory_limit_gb,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the CPU; torch's own choice if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each alternative is timed.")] = _TRAIN.rounds,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable_file, help="Write the figures to this file too."),
    ] = None,
) -> None:
    """Time optimizer steps with real padding: mixtures with h heads against softmax by SDPA and linear with 2h."""
    settings = TrainSettings(
        shapes=split(shapes),
        heads=tuple(int(part) for part in split(heads)),
        batch=batch,
        mixtures=mixtures,
        max_length=max_length,
        attention_dropout=attention_dropout,
        trainer_steps=trainer_steps,
        memory_limit_gb=memory_limit,
        threads=threads,
        rounds=rounds,
    )
    with cli_errors():
        from mgk._util.progress import Progress
        from mgk.bench import train as benchmark

        with Progress("bench train") as on_step:
            report = benchmark.run(settings, on_step)
        _show_training(report)
        _write(report.to_json(), json)


def _write(figures: dict[str, Any], path: Path | None) -> None:
    from mgk._util.files import write_json

    if path is not None:
        write_json(path, figures)


def _show_training(report: "TrainReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    s = report.settings
    for shape in s.shapes:
        title = f"{shape}: a training step, B={s.batch}, {report.mean_lengths[shape]:.0f} tokens on average"
        table = Table(title=title, caption=str(report.machine), box=box.SIMPLE_HEAD)
        for name in ("h", "model", "attention"):
            table.add_column(name, no_wrap=True)
        for name in ("ms", "ratio", "min", "max"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in report.steps:
            if row.shape == shape:
                ratios = (f"{number:.2f}" for number in (row.ratio, row.ratio_min, row.ratio_max))
                model = f"{row.model}:{row.heads}"
                table.add_row(str(row.group), model, row.attention, f"{row.milliseconds:.1f}", *ratios)
        Console().print(table)
    typer.echo("ratio: to softmax by SDPA, or to linear, with twice the heads; median, min and max over rounds.")
    for time in report.trainer:
        typer.echo(
            f"Trainer, {time.shape}, {time.model}:{time.heads}: {time.trainer_milliseconds:.1f} ms a step, bare loop"
            f" {time.bare_milliseconds:.1f} ms: {time.ratio:.2f} times."
        )
    for note in report.notes:
        typer.echo(f"Note: {note}.")


def _show_generation(report: "GenerateReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    s = report.settings
    speeds = Table(
        title=f"{s.tokens} tokens after {s.prompt}, B={s.batch}, {s.layers} layers of {s.width}, D={s.head_dim}",
        caption=str(report.machine),
        box=box.SIMPLE_HEAD,
    )
    speeds.add_column("model", no_wrap=True)
    for name in ("heads", "tokens/s", "x softmax", "min", "x GPT-2", "min", "cache MB"):
        speeds.add_column(name, justify="right", no_wrap=True)
    for row in report.speeds:
        ratios = (row.times_softmax, row.times_softmax_min, row.times_gpt2, row.times_gpt2_min)
        speeds.add_row(
            row.model,
            str(row.heads),
            f"{row.tokens_per_second:.1f}",
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{row.cache_bytes / 1e6:.3f}",
        )
    Console().print(speeds)
    typer.echo("x: how many times as fast in the same round, median and min. cache MB: after the last token.")
    for place in report.positions:
        typer.echo(f"{place.model} at position {place.position}: {place.milliseconds:.2f} ms for a token of the batch.")


def _show(report: "Report") -> None:
    from rich.console import Console

    for passes in report.settings.passes:
        Console().print(_table(report, passes))
    typer.echo("ratio: to the softmax by torch, median, min and max over rounds. MB: peak extra memory.")
    typer.echo("*: the backend that 'auto' takes.")
    for note in report.notes:
        typer.echo(f"Note: {note}.")


def _table(report: "Report", passes: Passes) -> "Table":
    from rich import box
    from rich.table import Table

    s = report.settings
    sizes = f"B={s.batch} H={s.heads} N={s.length} D={s.head_dim} M={s.mixtures} {s.dtype}"
    table = Table(
        title=f"{passes}, {sizes}{', causal' if s.causal else ''}", caption=str(report.machine), box=box.SIMPLE_HEAD
    )
    table.add_column("variant", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("ms", "ratio", "min", "max", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        if row.passes == passes:
            table.add_row(
                row.variant,
                str(row.heads),
                row.backend + (" *" if row.is_auto else ""),
                *(f"{number:.2f}" for number in (row.milliseconds, row.ratio, row.ratio_min, row.ratio_max)),
                "n/a" if row.peak_extra_mb is None else f"{row.peak_extra_mb:.1f}",
            )
    return table
