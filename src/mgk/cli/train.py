"""``mgk train``: from a recipe to a trained and tested model in the folder of a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk._util.progress import Progress
from mgk.cli.cli_errors import cli_errors
from mgk.variants import VARIANTS

if TYPE_CHECKING:
    from mgk.training import Recipe, RunSummary


def train(
    task: Annotated[
        str | None,
        typer.Argument(help="listops, text, retrieval, image, pathfinder, wikitext-2 or wikitext-103."),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(help="paper: as in the paper; laptop: an hour or less; smoke: seconds, on synthetic data."),
    ] = "laptop",
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run's folder.", show_default="runs/TASK-PRESET-ATTENTION-HEADSh-SEED"),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A recipe in place of TASK and preset: RUN/recipe.yaml.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the recipe, as in training.max_steps=100."),
    ] = None,
    attention: Annotated[str | None, typer.Option(help=f"model.attention: {', '.join(VARIANTS)}.")] = None,
    heads: Annotated[int | None, typer.Option(help="model.num_attention_heads.")] = None,
    mixtures: Annotated[int | None, typer.Option(help="model.num_mixtures.")] = None,
    layers: Annotated[int | None, typer.Option(help="model.num_hidden_layers.")] = None,
    steps: Annotated[int | None, typer.Option(help="training.max_steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="training.batch_size, of one step over all processes.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="training.accumulation.")] = None,
    lr: Annotated[float | None, typer.Option(help="training.learning_rate.")] = None,
    precision: Annotated[str | None, typer.Option(help="training.precision: float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="training.device: auto or cpu.")] = None,
    threads: Annotated[int | None, typer.Option(help="training.threads.")] = None,
    seed: Annotated[int | None, typer.Option(help="seed.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="data.folder, of the prepared data sets.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest valid checkpoint; needs --out only.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is there.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the recipe and exit.")] = False,
) -> None:
    """Train a model by a recipe, test it and save it. Several processes: torchrun ... -m mgk train ..."""
    options = {
        "model.attention": attention,
        "model.num_attention_heads": heads,
        "model.num_mixtures": mixtures,
        "model.num_hidden_layers": layers,
        "training.max_steps": steps,
        "training.batch_size": batch_size,
        "training.accumulation": accumulation,
        "training.learning_rate": lr,
        "training.precision": precision,
        "training.device": device,
        "training.threads": threads,
        "seed": seed,
        "data.folder": None if data is None else str(data),
    }
    with cli_errors():
        from mgk.training.recipe import parse_overrides
        from mgk.training.run_dir import check_run_dir

        overrides = {name: value for name, value in options.items() if value is not None}
        chosen = _recipe(task, preset, recipe, out if resume else None, overrides | parse_overrides(set_ or []))
        if print_config:
            typer.echo(chosen.to_yaml(), nl=False)
            return
        run = out or default_folder(chosen)
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first:  # before torch is imported
            check_run_dir(chosen, run, resume=resume, overwrite=overwrite)
            _check_data(chosen)
        summary = _train(chosen, run, resume, overwrite, is_first)
        if is_first:
            _show(summary, run)


def default_folder(recipe: "Recipe") -> Path:
    """The folder of a run without ``--out``."""
    model = recipe.model
    return Path("runs") / f"{recipe.task}-{recipe.preset}-{model.attention}-{model.num_attention_heads}h-{recipe.seed}"


def _recipe(
    task: str | None, preset: str, file: Path | None, resumed: Path | None, overrides: dict[str, Any]
) -> "Recipe":
    from mgk.training.errors import RecipeError
    from mgk.training.recipe import load_recipe, read_recipe
    from mgk.training.run_dir import RECIPE

    if task is not None and file is not None:
        raise RecipeError("give TASK or --recipe, not both")
    if task is not None:
        return load_recipe(task, preset, overrides=overrides)
    if file is None and resumed is None:
        raise RecipeError("give a TASK, or --recipe FILE, or --resume --out RUN")
    return read_recipe(file or resumed / RECIPE, overrides=overrides)  # type: ignore[operator]


def _check_data(recipe: "Recipe") -> None:
    """Raise, with what to do, when the data are absent and are not generated on first use."""
    from mgk.data.preparation import prepared
    from mgk.data.task_registry import find_task

    if not recipe.data.options and not find_task(recipe.data.name).is_synthetic:
        prepared(recipe.data.name, recipe.data.folder)


def _train(recipe: "Recipe", run: Path, resume: bool, overwrite: bool, is_first: bool) -> "RunSummary":
    from mgk.training.run import train as run_recipe

    metrics: dict[str, float] = {}
    total = recipe.training.max_steps

    def show(step: int, now: bool = False) -> None:
        progress.update(step, total, details=", ".join([f"{step:,} of {total:,}", *_figures(metrics)]), now=now)

    def on_step(step: int, total: int) -> None:
        if step < total:  # the evaluation after the last step shows it
            show(step)

    def on_log(line: dict[str, float]) -> None:
        metrics.update(line)
        if "eval_loss" in line:
            show(int(line["step"]), now=True)

    def on_test(done: int, total: int) -> None:
        if progress.label != "test":
            progress.restart("test")
        progress(done, total)

    with Progress(f"train {recipe.task}", is_shown=is_first) as progress:
        return run_recipe(
            recipe,
            run,
            resume=resume,
            overwrite=overwrite,
            on_step=on_step,
            on_log=on_log,
            on_test=on_test,
            on_note=lambda text: progress.note(f"Note: {text}"),
        )


def _figures(metrics: dict[str, float]) -> list[str]:
    formats = {
        "loss": "loss {:.4f}",
        "eval_accuracy": "accuracy {:.2%}",
        "eval_perplexity": "perplexity {:.2f}",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    return [text.format(metrics[name]) for name, text in formats.items() if name in metrics]


def _show(summary: "RunSummary", run: Path) -> None:
    from mgk.training.run_dir import wilson_interval

    memory = "" if summary.peak_memory_bytes is None else f", peak memory {summary.peak_memory_bytes / 1e6:,.0f} MB"
    sample = " (a synthetic sample, not the real task)" if summary.data.startswith("synthetic-") else ""
    model = f"{summary.attention}, {summary.heads} heads, {summary.parameters:,} parameters"
    speed = f"{summary.seconds_per_step:.3g} s each, {summary.tokens_per_second:,.0f} tokens/s"
    typer.echo(f"{model}, on {summary.data}{sample}")
    typer.echo(f"{summary.steps:,} steps, {speed}{memory}")
    if summary.correct is not None and summary.examples:
        found = wilson_interval(summary.correct, summary.examples)
        typer.echo(
            f"test accuracy {found.estimate:.2%} (95% CI {found.low:.2%} to {found.high:.2%},"
            f" {summary.examples:,} examples)"
        )
    for name in ("best_validation_accuracy", "test_perplexity", "test_sliding_perplexity"):
        if name in summary.metrics:
            value = summary.metrics[name]
            how = f" ({summary.how[name]})" if name in summary.how else ""
            typer.echo(f"{name.replace('_', ' ')} {f'{value:.2%}' if 'accuracy' in name else f'{value:.2f}'}{how}")
    typer.echo(f"model: {run / 'model'}; evaluate it with: mgk eval {run}")
