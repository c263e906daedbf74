"""``mgk analyze``: what models cost, by formula, and what the heads of a trained one do."""

from typing import TYPE_CHECKING, Annotated

import typer

from mgk.analysis import cost_model as model
from mgk.analysis.cost_model import BASELINES, VARIANTS, Sizes, Variant
from mgk.cli.analyze_runs import maps, mixtures, ranks, redundancy
from mgk.cli.options import one_of, some_of, split

if TYPE_CHECKING:
    from mgk.analysis.formula import Quantity

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into models and what they cost.")
app.command()(maps)
app.command()(ranks)
app.command()(redundancy)
app.command()(mixtures)

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SYMBOLS = "BNPLCFHDMKRVW"
_BY_FAMILY: tuple[Variant, ...] = ("softmax", "mgk", "smgk", "linear", "mlk", "smlk")


@app.callback()
def analyze() -> None:
    """Look into models and what they cost."""


def parse_size(text: str) -> int:
    """A whole number with or without a suffix: 128k is 128,000, 128Ki is 131,072."""
    number = text.strip()
    factor = 1
    for suffix, value in sorted(_SUFFIXES.items(), key=lambda item: -len(item[0])):
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), value
            break
    try:
        size = float(number) * factor
    except ValueError:
        size = 0.0
    if size < 1 or size != int(size):
        suffixes = ", ".join(_SUFFIXES)
        raise typer.BadParameter(f"{text!r} is not a whole number from 1 up, with or without one of {suffixes}")
    return int(size)


def _size(text: str | None) -> str | None:
    if text is not None:
        parse_size(text)
    return text


def _given(text: str | None, default: int) -> int:
    return default if text is None else parse_size(text)


_SIZE_HELP = "; 128k is 128,000, 128Ki is 131,072."


@app.command()
def cost(
    heads: Annotated[int, typer.Option(min=1, help="H, of the mixtures; softmax and linear have twice as many.")] = 8,
    length: Annotated[str, typer.Option(callback=_size, metavar="SIZE", help="N" + _SIZE_HELP)] = "2048",
    layers: Annotated[int, typer.Option(min=1, help="L.")] = 16,
    head_dim: Annotated[int, typer.Option(min=1, help="D, the same for all.")] = 64,
    hidden: Annotated[str | None, typer.Option(callback=_size, metavar="SIZE", help="C.", show_default="2 H D")] = None,
    intermediate: Annotated[
        str | None, typer.Option(callback=_size, metavar="SIZE", help="F.", show_default="4 C")
    ] = None,
    mixtures: Annotated[int, typer.Option(min=1, help="M.")] = 2,
    vocab: Annotated[str, typer.Option(callback=_size, metavar="SIZE", help="V.")] = "32k",
    batch: Annotated[str, typer.Option(callback=_size, metavar="SIZE", help="B.")] = "1",
    dtype: Annotated[
        str, typer.Option(callback=one_of(tuple(_BYTES)), help=f"One of {', '.join(_BYTES)}.")
    ] = "float32",
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="A decoder, or an encoder.")] = True,
    e_step: Annotated[str, typer.Option(callback=one_of(("soft", "hard")), help="soft or hard.")] = "soft",
    prior: Annotated[
        str, typer.Option(callback=one_of(("learned", "em", "uniform")), help="learned, em or uniform.")
    ] = "learned",
    plain: Annotated[
        bool, typer.Option("--plain", help="Count Eq. 9 as it is written: a product for each component of smgk too.")
    ] = False,
    variants: Annotated[
        str, typer.Option(callback=some_of(VARIANTS), help=f"Some of {','.join(VARIANTS)}.", show_default="all")
    ] = ",".join(VARIANTS),
    formulas: Annotated[bool, typer.Option("--formulas/--no-formulas", help="Whether to show them.")] = True,
) -> None:
    """Parameters, FLOPs and bytes of mixtures with H heads beside softmax and linear attention with 2H."""
    width = _given(hidden, 2 * heads * head_dim)
    chosen = split(variants)
    all_sizes = [
        Sizes(
            attention=name,
            heads=heads if name in BASELINES else 2 * heads,
            head_dim=head_dim,
            hidden=width,
            layers=layers,
            intermediate=_given(intermediate, 4 * width),
            length=parse_size(length),
            batch=parse_size(batch),
            mixtures=mixtures,
            vocab=parse_size(vocab),
            head="language",
            causal=causal,
            e_step="soft" if name in ("linear", "mlk", "smlk") else e_step,
            prior=prior,
            position="rotary",
            bytes_per_number=_BYTES[dtype],
            formulation="plain" if plain else "fused",
        )
        for name in _BY_FAMILY
        if name in chosen
    ]
    _show(all_sizes)
    if formulas:
        _show_formulas(all_sizes)


_QUANTITIES = (
    model.attention_parameters,
    model.layer_parameters,
    model.model_parameters,
    model.attention_flops,
    model.forward_flops,
    model.training_flops,
    model.cache_bytes,
    model.activation_bytes,
)


def _show(all_sizes: list[Sizes]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mgk.experiments.render.numbers import short

    first = all_sizes[0]
    title = f"N={first.length:,} B={first.batch} L={first.layers} C={first.hidden} F={first.intermediate}"
    caption = "In brackets: the ratio to softmax, or linear, with twice the heads."
    table = Table(title=f"{title} D={first.head_dim} M={first.mixtures}", caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("")
    for sizes in all_sizes:
        table.add_column(f"{sizes.attention}:{sizes.heads}", justify="right")
    for count in _QUANTITIES:
        cells = []
        for sizes in all_sizes:
            value = count(sizes).value
            ratio = f" ({value / count(sizes.baseline()).value:.2f})" if sizes.is_mixture else ""
            cells.append(f"{short(value)}{ratio}")
        table.add_row(count(first).name, *cells)
    Console().print(table)
    typer.echo(
        "A multiply-add is 2 FLOPs; training is 3 forwards; attention is that of one layer, for the whole batch."
    )


def _show_formulas(all_sizes: list[Sizes]) -> None:
    typer.echo(
        "\nB sequences, N tokens, P attended pairs, L layers, C width, F feed-forward width, H heads, D head width,"
        "\nM components, K projected keys a token, R features, V words, W bytes of a number\n"
    )
    for sizes in all_sizes:
        symbols = sizes.symbols
        values = " ".join(f"{name}={symbols[name]}" for name in _SYMBOLS)
        typer.echo(f"{sizes.attention}:{sizes.heads}  {values}")
        for count in _QUANTITIES:
            typer.echo(_indented(count(sizes)))


def _indented(quantity: "Quantity") -> str:
    return "\n".join(f"  {line}" for line in quantity.explain().splitlines())
