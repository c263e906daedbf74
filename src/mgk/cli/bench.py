"""``mgk bench``: what attention costs on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mgk.bench.settings import BACKENDS, DEVICES, DTYPES, PASSES, VARIANTS, Passes, Settings
from mgk.cli.options import device as check_device
from mgk.cli.options import one_of, some_of, split, writable_file

if TYPE_CHECKING:
    from rich.table import Table

    from mgk.bench.report import Report

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure time and memory on this machine.")
_DEFAULT = Settings()


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
    # Imports torch, which takes a second or more: only once the options are known to be right.
    from mgk.bench import attention as benchmark
    from mgk.bench.json_file import write_json
    from mgk.cli.progress import progress

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
    try:
        with progress("bench attention") as on_step:
            report = benchmark.run(settings, on_step)
        _show(report)
        if json is not None:
            write_json(json, report.to_json())
    except (benchmark.BenchError, OSError) as error:
        typer.echo(f"mgk: {error}", err=True)
        raise typer.Exit(1) from None


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
