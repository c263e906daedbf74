"""``mgk train``: from a recipe to a trained and tested model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from mgk._util.progress import Progress
from mgk.cli.cli_errors import cli_errors, is_first_rank
from mgk.cli.options import with_options
from mgk.data.task_registry import SYNTHETIC
from mgk.variants import VARIANTS

if TYPE_CHECKING:
    from mgk.training import Recipe, RunSummary


# Options that are fields of the recipe: type, field, and what its help adds.
_FIELDS: dict[str, tuple[type, str, str]] = {
    "attention": (str, "model.attention", f": {', '.join(VARIANTS)}"),
    "heads": (int, "model.num_attention_heads", ""),
    "kv_heads": (int, "model.num_key_value_heads", ", which divides the heads"),
    "mixtures": (int, "model.num_mixtures", ""),
    "layers": (int, "model.num_hidden_layers", ""),
    "steps": (int, "training.max_steps", ""),
    "batch_size": (int, "training.batch_size", ", of one step over all processes"),
    "accumulation": (int, "training.accumulation", ""),
    "lr": (float, "training.learning_rate", ""),
    "precision": (str, "training.precision", ": float32 or bfloat16"),
    "device": (str, "training.device", ": auto or cpu"),
    "threads": (int, "training.threads", ""),
    "seed": (int, "seed", ""),
    "data": (Path, "data.folder", ", of the prepared data sets"),
}
_OPTIONS = {
    name: Annotated[kind | None, Option(help=f"{field}{text}.")]
    for name, (kind, field, text) in _FIELDS.items()
}


@with_options(_OPTIONS)
def train(
    task: Annotated[
        str | None,
        Argument(help="listops, text, retrieval, image, pathfinder, wikitext-2, wikitext-103 or bytes."),
    ] = None,
    preset: Annotated[
        str,
        Option(
            help="paper: as in the paper; workstation, laptop: an hour or less; smoke: seconds, on synthetic data."
        ),
    ] = "laptop",
    out: Annotated[
        Path | None,
        Option(metavar="RUN", help="The run's folder.", show_default="runs/TASK-PRESET-ATTENTION-HEADSh-SEED"),
    ] = None,
    recipe: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="In place of TASK and preset: RUN/recipe.yaml, or a file of results/trials."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="FIELD=VALUE", help="Any field of the recipe, as in training.max_steps=100."),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on from the newest valid checkpoint; needs --out only.")
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Delete the run that is there.")] = False,
    print_config: Annotated[bool, Option("--print-config", help="Print the recipe and exit.")] = False,
    **options: Any,
) -> None:
    """Train a model by a recipe, test and save it. Several processes: torchrun -m mgk train ..."""
    with cli_errors():
        from mgk.training.recipe import parse_overrides
        from mgk.training.run_dir import check_run_dir

        overrides = {_FIELDS[name][1]: value for name, value in options.items() if value is not None}
        overrides |= parse_overrides(set_ or [])
        chosen = _recipe(task, preset, recipe, out if resume else None, overrides)
        if print_config:
            typer.echo(chosen.to_yaml(), nl=False)
            return
        run = out or default_folder(chosen)
        is_first = is_first_rank()
        if is_first:  # before torch is imported
            check_run_dir(chosen, run, resume=resume, overwrite=overwrite)
            chosen.data.check()
        summary = _train(chosen, run, resume, overwrite, is_first)
        if is_first:
            _show(summary, run)


def default_folder(recipe: "Recipe") -> Path:
    """The folder of a run without ``--out``."""
    model = recipe.model
    groups = "" if model.num_key_value_heads is None else f"-{model.num_key_value_heads}kv"
    heads = f"{model.num_attention_heads}h{groups}"
    return Path("runs") / f"{recipe.task}-{recipe.preset}-{model.attention}-{heads}-{recipe.seed}"


def _recipe(
    task: str | None, preset: str, file: Path | None, resumed: Path | None, overrides: dict[str, Any]
) -> "Recipe":
    from mgk.training.errors import RecipeError
    from mgk.training.recipe import load_recipe, read_recipe
    from mgk.training.run_dir import read_run_recipe

    if task is not None and file is not None:
        raise RecipeError("give TASK or --recipe, not both")
    if task is not None:
        return load_recipe(task, preset, overrides=overrides)
    if file is not None:
        return read_recipe(file, overrides=overrides)
    if resumed is None:
        raise RecipeError("give a TASK, or --recipe FILE, or --resume --out RUN")
    return read_run_recipe(resumed, overrides=overrides)


def _train(recipe: "Recipe", run: Path, resume: bool, overwrite: bool, is_first: bool) -> "RunSummary":
    from mgk.training.run import train as run_recipe

    metrics: dict[str, float] = {}
    total = recipe.training.max_steps

    def show(step: int, now: bool = False) -> None:
        figures = [f"{step:,} of {total:,}", *_figures(metrics)]
        progress.update(step, total, details=", ".join(figures), now=now)

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
        "eval_bits_per_byte": "{:.4f} bits per byte",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    return [text.format(metrics[name]) for name, text in formats.items() if name in metrics]


def _show(summary: "RunSummary", run: Path) -> None:
    from mgk.training.run_dir import wilson_interval

    peak, memory, sample = summary.peak_memory_bytes, "", ""
    if peak is not None:
        memory = f", peak memory {peak / 1e6:,.0f} MB"
    if summary.data.startswith(SYNTHETIC):
        sample = " (a synthetic sample, not the real task)"
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
    formats = {
        "best_validation_accuracy": ".2%",
        "test_bits_per_byte": ".4f",
        "test_perplexity": ".2f",
        "test_sliding_perplexity": ".2f",
    }
    for name, digits in formats.items():
        if name in summary.metrics:
            how = f" ({summary.how[name]})" if name in summary.how else ""
            typer.echo(f"{name.replace('_', ' ')} {summary.metrics[name]:{digits}}{how}")
    typer.echo(f"model: {run / 'model'}; evaluate it with: mgk eval {run}")
