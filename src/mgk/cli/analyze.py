"""``mgk analyze``: the cost of models, and the attention of a trained one."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from typer import Option

from mgk._util.errors import UsageError
from mgk.analysis import cost_model
from mgk.analysis.cost_model import Sizes
from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import Json, Run, Split, one_of, some_of, split, whole_numbers, writable_file
from mgk.cli.tables import print_table
from mgk.variants import DEFAULT_E_STEP, DEFAULT_NUM_MIXTURES, DEFAULT_PRIOR, VARIANTS, EStep, Prior, Variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgk.training.tasks import TaskData

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Inspect models and their cost.")

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_SUFFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}
_SYMBOLS = "BNPLCFHDMKRVW"
_BY_FAMILY: tuple[Variant, ...] = ("softmax", "mgk", "smgk", "linear", "mlk", "smlk")
_QUANTITIES = (
    cost_model.attention_parameters,
    cost_model.layer_parameters,
    cost_model.model_parameters,
    cost_model.attention_flops,
    cost_model.forward_flops,
    cost_model.training_flops,
    cost_model.cache_bytes,
    cost_model.activation_bytes,
)
_COST_LEGEND = """\
In parentheses: the ratio to softmax or linear attention with twice the heads. A multiply-add is 2 FLOPs;
training is 3 forwards; attention is that of one layer, for the whole batch."""
_SYMBOL_LEGEND = """
B sequences, N tokens, P attended pairs, L layers, C width, F feed-forward width, H heads, D head width,
M components, K projected keys a token, R features, V words, W bytes of a number
"""
_IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


def parse_size(text: str | int) -> int:
    """A whole number: 128k is 128,000, 128Ki is 131,072."""
    number = str(text).strip()
    suffix = next((ending for ending in _SUFFIXES if number.endswith(ending)), "")
    try:
        size = float(number.removesuffix(suffix)) * _SUFFIXES.get(suffix, 1)
    except ValueError:
        size = 0.0
    if size < 1 or size != int(size):
        known = ", ".join(_SUFFIXES)
        raise typer.BadParameter(f"{text!r} is not a whole number from 1 up, with or without one of {known}")
    return int(size)


def _size(help_: str, **options: Any) -> Any:
    return Option(parser=parse_size, metavar="SIZE", help=help_, **options)


def _choice(names: Sequence[str]) -> Any:
    return Option(callback=one_of(tuple(names)), help=f"One of {', '.join(names)}.")


def _image(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in _IMAGE_SUFFIXES:
        raise typer.BadParameter(f"{str(path)!r} must end in {', '.join(_IMAGE_SUFFIXES)}")
    return writable_file(path)


@app.callback()
def analyze() -> None:
    """Inspect models and their cost."""


@app.command()
def cost(
    heads: Annotated[int, Option(min=1, help="H, of the mixtures; softmax and linear have twice as many.")] = 8,
    length: Annotated[int, _size("N; 128k is 128,000, 128Ki is 131,072.")] = 2048,
    layers: Annotated[int, Option(min=1, help="L.")] = 16,
    head_dim: Annotated[int, Option(min=1, help="D, the same for all.")] = 64,
    hidden: Annotated[int | None, _size("C.", show_default="2 H D")] = None,
    intermediate: Annotated[int | None, _size("F.", show_default="4 C")] = None,
    mixtures: Annotated[int, Option(min=1, help="M.")] = DEFAULT_NUM_MIXTURES,
    vocab: Annotated[int, _size("V.")] = 32_000,
    batch: Annotated[int, _size("B.")] = 1,
    dtype: Annotated[str, _choice(tuple(_BYTES))] = "float32",
    causal: Annotated[bool, Option("--causal/--no-causal", help="A decoder, or an encoder.")] = True,
    e_step: Annotated[str, _choice(get_args(EStep))] = DEFAULT_E_STEP,
    prior: Annotated[str, _choice(get_args(Prior))] = DEFAULT_PRIOR,
    unfused: Annotated[
        bool, Option("--unfused", help="Count Eq. 9 literally: a product for each component of smgk too.")
    ] = False,
    variants: Annotated[
        str,
        Option(callback=some_of(tuple(VARIANTS)), help=f"Some of {','.join(VARIANTS)}.", show_default="all"),
    ] = ",".join(VARIANTS),
    formulas: Annotated[bool, Option("--formulas/--no-formulas", help="Whether to print them.")] = True,
) -> None:
    """Parameters, FLOPs and bytes of mixtures with H heads and baselines with 2H."""
    width = hidden or 2 * heads * head_dim
    models = [
        Sizes(
            attention=name,
            heads=heads if VARIANTS[name].is_mixture else 2 * heads,
            head_dim=head_dim,
            hidden=width,
            layers=layers,
            intermediate=intermediate or 4 * width,
            length=length,
            batch=batch,
            mixtures=mixtures,
            vocab=vocab,
            head="language",
            causal=causal,
            prior=cast("Prior", prior),
            e_step=DEFAULT_E_STEP if VARIANTS[name].is_linear else cast("EStep", e_step),
            position="rotary",
            bytes_per_number=_BYTES[dtype],
            fused=not unfused,
        )
        for name in _BY_FAMILY
        if name in split(variants)
    ]
    _print_costs(models)
    if formulas:
        _print_formulas(models)


def _print_costs(models: Sequence[Sizes]) -> None:
    from mgk.experiments.render.numbers import short

    first = models[0]
    rows = []
    for count in _QUANTITIES:
        cells = []
        for sizes in models:
            value = count(sizes).value
            ratio = f" ({value / count(sizes.baseline()).value:.2f})" if sizes.variant.is_mixture else ""
            cells.append(f"{short(value)}{ratio}")
        rows.append([count(first).name, *cells])
    shown = {"N": f"{first.length:,}", "B": first.batch, "L": first.layers, "C": first.hidden}
    shown |= {"F": first.intermediate, "D": first.head_dim, "M": first.mixtures}
    title = " ".join(f"{name}={value}" for name, value in shown.items())
    print_table(title, ["", *(f"{sizes.attention}:{sizes.heads}" for sizes in models)], rows)
    typer.echo(_COST_LEGEND)


def _print_formulas(models: Sequence[Sizes]) -> None:
    typer.echo(_SYMBOL_LEGEND)
    for sizes in models:
        values = " ".join(f"{name}={sizes.symbols[name]}" for name in _SYMBOLS)
        typer.echo(f"{sizes.attention}:{sizes.heads}  {values}")
        for count in _QUANTITIES:
            typer.echo("\n".join(f"  {line}" for line in count(sizes).explain().splitlines()))


Examples = Annotated[int, Option("--examples", min=1, help="Examples that the numbers are a mean over.")]
Indices = Annotated[str, Option(callback=whole_numbers, help="From 1, such as 1,2.", show_default="all")]
_IMAGE = Option(metavar="FILE", callback=_image, help="The image: .png, .svg or .pdf.")


@app.command()
def maps(
    run: Run,
    layers: Indices = "",
    heads: Indices = "",
    example: Annotated[int, Option(min=1, help="Which example of the split, from 1.")] = 1,
    split_: Split = "test",
    out: Annotated[Path, _IMAGE] = Path("maps.png"),
    json: Json = None,
) -> None:
    """Draw attention maps of one example: a row per layer, a column per head."""
    with cli_errors():
        data, model, rows = _load(run, split_)
        chosen = {
            "layers": _from_one("layers", layers, model.config.num_hidden_layers),
            "heads": _from_one("heads", heads, model.config.num_attention_heads),
        }
        if example > len(rows):
            raise UsageError(f"example must be from 1 to {len(rows)}, got {example}")

        from mgk.analysis.attention_maps import attention_maps, attention_spread, draw_grid

        (result,) = attention_maps(model, [rows[example - 1]], **chosen)
        title = f"{model.config.attention}, {data.task.name}, example {example} of {split_}"
        draw_grid(result, title=title, file=out)
        places = [(layer, head) for layer in result.layers for head in result.heads]
        values, table = [], []
        for (layer, head), (_, weights) in zip(places, result.items(), strict=True):
            spread = attention_spread(weights)
            values.append({"layer": layer + 1, "head": head + 1, **vars(spread)})
            cells = (f"{spread.positions:.1f}", f"{spread.nearby:.1%}", f"{spread.top_share:.1%}")
            table.append([str(layer + 1), str(head + 1), *cells])
        print_table(
            f"Attention of the average query over {result.weights.shape[-1]} positions",
            ["layer", "head", "effective positions", "within 2", "top position's share"],
            table,
        )
        _write(json, {"example": example, "split": split_, "maps": values})
        typer.echo(f"image: {out}")


@app.command()
def ranks(
    run: Run,
    samples: Annotated[int, Option(min=1, help="Attention matrices of each layer.")] = 1000,
    threshold: Annotated[float, Option(min=0.0, help="The smallest singular value that counts.")] = 1e-6,
    seed: Annotated[int, Option(min=0, help="Of the draw.")] = 0,
    split_: Split = "test",
    json: Json = None,
) -> None:
    """Ranks of sampled attention matrices, as in the paper, and effective ranks."""
    with cli_errors():
        _, model, rows = _load(run, split_)

        from mgk._util.progress import Progress
        from mgk.analysis.attention_rank import rank_distributions

        with Progress("ranks") as on_step:
            layers = rank_distributions(
                model, rows, count=samples, threshold=threshold, seed=seed, on_step=on_step
            )
        print_table(
            f"Ranks: singular values of {threshold:g} and more",
            ["layer", "matrices", "mean N", "mean rank", "standard deviation", "range", "effective rank"],
            [
                [
                    str(layer.layer + 1),
                    str(len(layer.ranks)),
                    f"{layer.lengths.mean():.1f}",
                    f"{layer.ranks.mean():.1f}",
                    f"{layer.ranks.std():.1f}",
                    f"{layer.ranks.min()} to {layer.ranks.max()}",
                    f"{layer.effective.mean():.1f}",
                ]
                for layer in layers
            ],
        )
        values = _layer_values(layers, ("ranks", "effective", "lengths"))
        _write(json, {"split": split_, "threshold": threshold, "seed": seed, "layers": values})


@app.command()
def redundancy(run: Run, examples: Examples = 32, split_: Split = "test", json: Json = None) -> None:
    """Similarity of heads: 1 if identical, 0 if they never attend to the same keys."""
    with cli_errors():
        _, model, rows = _load(run, split_)

        from mgk.analysis.redundancy import redundancy as measure

        chosen = _first(rows, examples)
        result = measure(model, chosen)
        heads = [[layer + 1, head + 1] for layer, head in result.heads]
        names = [f"{layer}.{head}" for layer, head in heads]
        similar = zip(names, result.similarity, strict=True)
        cells = [[name, *(f"{value:.3f}" for value in row)] for name, row in similar]
        print_table("Head similarity (layer.head)", ["", *names], cells)
        means = {"within_layers": result.within_layers, "across_layers": result.across_layers}
        for name, value in means.items():
            typer.echo(f"mean {name.replace('_', ' ')}: {'no pair' if value is None else f'{value:.3f}'}")
        values = {"heads": heads, "similarity": result.similarity.tolist(), **means}
        _write(json, {"split": split_, "examples": len(chosen), **values})


@app.command()
def mixtures(run: Run, examples: Examples = 32, split_: Split = "test", json: Json = None) -> None:
    """Use of the components of a key: priors, shares, certainty, distances."""
    with cli_errors():
        _, model, rows = _load(run, split_)
        if not VARIANTS[model.config.attention].is_mixture:
            raise UsageError(f"{run}: {model.config.attention} has one key a position, not a mixture")

        from mgk.analysis.mixture_usage import mixture_usage

        chosen = _first(rows, examples)
        layers = mixture_usage(model, chosen)
        print_table(
            "Components of a key",
            ["layer", "head", "priors", "shares", "certainty", "largest distance"],
            [
                [
                    str(layer.layer + 1),
                    str(head + 1),
                    ", ".join(f"{value:.3f}" for value in layer.prior[head].tolist()),
                    ", ".join(f"{value:.3f}" for value in layer.share[head].tolist()),
                    f"{layer.certainty[head]:.3f}",
                    f"{layer.distance[head].max():.2f}",
                ]
                for layer in layers
                for head in range(len(layer.prior))
            ],
        )
        values = _layer_values(layers, ("prior", "share", "certainty", "distance"))
        _write(json, {"split": split_, "examples": len(chosen), "layers": values})


def _load(run: Path, split_: str) -> tuple["TaskData", "PreTrainedModel", Any]:
    """Data, model and split of a finished run; torch comes after user errors."""
    from mgk.training.run_dir import finished_recipe

    recipe = finished_recipe(run)

    from mgk.training.tasks import load_model, open_data

    data = open_data(recipe.data)
    if split_ not in data.manifest.splits:
        splits = ", ".join(data.manifest.splits)
        raise UsageError(f"{data.task.name} has no split {split_!r}; it has {splits}")
    return data, load_model(run, data.task), data.split(split_)


def _first(rows: Any, count: int) -> list[Any]:
    return [rows[place] for place in range(min(count, len(rows)))]


def _from_one(name: str, text: str, limit: int) -> list[int] | None:
    """Indices from 0 of a list of numbers from 1; None for all."""
    numbers = [int(part) for part in split(text)]
    for number in numbers:
        if number > limit:
            raise UsageError(f"{name} must be from 1 to {limit}, got {number}")
    return [number - 1 for number in numbers] or None


def _layer_values(layers: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    values = []
    for layer in layers:
        numbers = {name: getattr(layer, name).tolist() for name in names}
        values.append({"layer": layer.layer + 1, **numbers})
    return values


def _write(path: Path | None, values: dict[str, Any]) -> None:
    if path is not None:
        from mgk._util.files import write_json

        write_json(path, values)
        typer.echo(f"numbers: {path}")
