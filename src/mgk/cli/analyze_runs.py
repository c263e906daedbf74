"""``mgk analyze maps|ranks|redundancy|mixtures RUN``: what the heads of a trained model do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import one_of, split, whole_numbers, writable_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgk.training.tasks import TaskData

_SPLITS = ("train", "validation", "test")
_PICTURES = (".png", ".svg", ".pdf")


def _picture(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in _PICTURES:
        raise typer.BadParameter(f"{str(path)!r} must end in {', '.join(_PICTURES)}")
    return writable_file(path)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Split = Annotated[str, typer.Option("--split", callback=one_of(_SPLITS), help=f"One of {', '.join(_SPLITS)}.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", callback=writable_file, help="Write the numbers to this file.")
]
Some = Annotated[int, typer.Option("--examples", min=1, help="Examples that the figures are a mean over.")]


def maps(
    run: Run,
    layers: Annotated[str, typer.Option(callback=whole_numbers, help="From 1, such as 1,2.", show_default="all")] = "",
    heads: Annotated[str, typer.Option(callback=whole_numbers, help="From 1, such as 1,2.", show_default="all")] = "",
    example: Annotated[int, typer.Option(min=1, help="Which example of the split, from 1.")] = 1,
    split_: Split = "test",
    out: Annotated[
        Path, typer.Option(metavar="FILE", callback=_picture, help="The picture: .png, .svg or .pdf.")
    ] = Path("maps.png"),
    json: Json = None,
) -> None:
    """Draw attention maps of one example: a row a layer, a column a head."""
    with cli_errors():
        data, model = _opened(run)
        chosen = {
            name: _numbers(name, text, limit)
            for name, text, limit in (
                ("layers", layers, model.config.num_hidden_layers),
                ("heads", heads, model.config.num_attention_heads),
            )
        }
        (row,) = _examples(data, split_, [example - 1])

        from mgk.analysis.attention_maps import attention_maps, draw_grid, reach

        (found,) = attention_maps(model, [row], **chosen)
        title = f"{model.config.attention}, {data.task.name}, example {example} of {split_}"
        draw_grid(found, title=title, file=out)
        rows, values = [], []
        for layer in range(len(found.layers)):
            for head in range(len(found.heads)):
                seen = reach(found.weights[layer, head])
                where = (found.layers[layer] + 1, found.heads[head] + 1)
                rows.append(
                    [*map(str, where), f"{seen.positions:.1f}", f"{seen.nearby:.1%}", f"{seen.share_of_top:.1%}"]
                )
                values.append({"layer": where[0], "head": where[1], **vars(seen)})
        columns = ["layer", "head", "positions", "within 2", "top position's share"]
        _show(f"Where the average query of {found.weights.shape[-1]} looks", columns, rows)
        _write(json, {"example": example, "split": split_, "maps": values})
        typer.echo(f"picture: {out}")


def ranks(
    run: Run,
    count: Annotated[int, typer.Option(min=1, help="Attention matrices of each layer.")] = 1000,
    threshold: Annotated[float, typer.Option(min=0.0, help="Of a singular value that counts.")] = 1e-6,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
    split_: Split = "test",
    json: Json = None,
) -> None:
    """Ranks of sampled attention matrices by singular values, as in the paper, and effective ranks."""
    with cli_errors():
        data, model = _opened(run)
        examples = _split(data, split_)

        from mgk._util.progress import Progress
        from mgk.analysis.attention_rank import rank_distributions

        with Progress("ranks") as on_step:
            found = rank_distributions(model, examples, count=count, threshold=threshold, seed=seed, on_step=on_step)
        rows = [
            [
                str(item.layer + 1),
                str(len(item.ranks)),
                f"{item.lengths.mean():.1f}",
                f"{item.ranks.mean():.1f}",
                f"{item.ranks.std():.1f}",
                f"{item.ranks.min()} to {item.ranks.max()}",
                f"{item.effective.mean():.1f}",
            ]
            for item in found
        ]
        columns = ["layer", "matrices", "mean N", "mean rank", "deviation", "range", "effective rank"]
        _show(f"Ranks: singular values of {threshold:g} and more", columns, rows)
        layers = [
            {
                "layer": item.layer + 1,
                "ranks": item.ranks.tolist(),
                "effective": item.effective.tolist(),
                "lengths": item.lengths.tolist(),
            }
            for item in found
        ]
        _write(json, {"split": split_, "threshold": threshold, "seed": seed, "layers": layers})


def redundancy(run: Run, examples: Some = 32, split_: Split = "test", json: Json = None) -> None:
    """How alike the heads are: 1 where two always look at the same places, 0 where they never do."""
    with cli_errors():
        data, model = _opened(run)
        chosen = _first(data, split_, examples)

        from mgk.analysis.redundancy import redundancy as measure

        found = measure(model, chosen)
        names = [f"{layer + 1}.{head + 1}" for layer, head in found.heads]
        rows = [[name, *(f"{value:.3f}" for value in row)] for name, row in zip(names, found.similarity, strict=True)]
        _show("Likeness of heads (layer.head)", ["", *names], rows)
        for what, value in (("one layer", found.within_layers), ("different layers", found.across_layers)):
            typer.echo(f"mean over pairs of {what}: {'there are none' if value is None else f'{value:.3f}'}")
        numbers = {
            "heads": [[layer + 1, head + 1] for layer, head in found.heads],
            "similarity": found.similarity.tolist(),
            "within_layers": found.within_layers,
            "across_layers": found.across_layers,
        }
        _write(json, {"split": split_, "examples": len(chosen), **numbers})


def mixtures(run: Run, examples: Some = 32, split_: Split = "test", json: Json = None) -> None:
    """What the components of a key do: priors, shares of the attention, certainty, distances."""
    with cli_errors():
        data, model = _opened(run)
        chosen = _first(data, split_, examples)

        from mgk.training.errors import RecipeError

        if model.config.attention in ("softmax", "linear"):
            raise RecipeError(f"{run}: {model.config.attention} has one key a position: there is no mixture to look at")
        from mgk.analysis.mixture_usage import mixture_usage

        found = mixture_usage(model, chosen)
        rows = [
            [
                str(item.layer + 1),
                str(head + 1),
                ", ".join(f"{value:.3f}" for value in item.prior[head].tolist()),
                ", ".join(f"{value:.3f}" for value in item.share[head].tolist()),
                f"{item.certainty[head]:.3f}",
                f"{item.distance[head].max():.2f}",
            ]
            for item in found
            for head in range(len(item.prior))
        ]
        _show("Components of a key", ["layer", "head", "priors", "shares", "certainty", "largest distance"], rows)
        names = ("prior", "share", "certainty", "distance")
        layers = [{"layer": item.layer + 1, **{name: getattr(item, name).tolist() for name in names}} for item in found]
        _write(json, {"split": split_, "examples": len(chosen), "layers": layers})


def _opened(run: Path) -> tuple["TaskData", "PreTrainedModel"]:
    """The data and the model of a finished run; anything else is a wrong request, told before torch is imported."""
    from mgk.training.errors import RecipeError
    from mgk.training.recipe import read_recipe
    from mgk.training.run_dir import MODEL, RECIPE

    if not (run / RECIPE).is_file():
        raise RecipeError(f"{run}: there is no run here ({RECIPE} is missing)")
    recipe = read_recipe(run / RECIPE)
    if not (run / MODEL).is_dir():
        raise RecipeError(f"{run}: this run is not finished: go on with mgk train --resume --out {run}")

    from mgk.training.tasks import load_model, open_data

    data = open_data(recipe.data)
    return data, load_model(run, data.task)


def _split(data: "TaskData", name: str) -> Any:
    from mgk.training.errors import RecipeError

    if name not in data.manifest.splits:
        raise RecipeError(f"{data.task.name} has no split {name!r}; it has {', '.join(data.manifest.splits)}")
    return data.split(name)


def _examples(data: "TaskData", name: str, places: Sequence[int]) -> list[Any]:
    from mgk.training.errors import RecipeError

    rows = _split(data, name)
    for place in places:
        if place >= len(rows):
            raise RecipeError(f"example must be from 1 to {len(rows)}, got {place + 1}")
    return [rows[place] for place in places]


def _first(data: "TaskData", name: str, number: int) -> list[Any]:
    return _examples(data, name, range(min(number, len(_split(data, name)))))


def _numbers(name: str, text: str, limit: int) -> list[int] | None:
    """Numbers from 1 as places from 0; None for all."""
    from mgk.training.errors import RecipeError

    wanted = [int(part) for part in split(text)]
    for number in wanted:
        if number > limit:
            raise RecipeError(f"{name} must be from 1 to {limit}, got {number}")
    return [number - 1 for number in wanted] or None


def _show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _write(path: Path | None, values: dict[str, Any]) -> None:
    if path is not None:
        from mgk._util.files import write_json

        write_json(path, values)
        typer.echo(f"numbers: {path}")
