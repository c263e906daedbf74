"""``mgk generate``: text from the language model of a run, streamed."""

from typing import Annotated

import typer
from typer import Option

from mgk.cli.cli_errors import cli_errors
from mgk.cli.options import Run


def generate(
    run: Run,
    prompt: Annotated[str, Option(help="What the text begins with.")] = "",
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to generate.")] = 100,
    temperature: Annotated[
        float, Option(min=0.001, help="Below 1: likelier words; above 1: rarer ones.")
    ] = 1.0,
    top_k: Annotated[int, Option(min=0, help="Sample from the most likely tokens only; 0 for all.")] = 50,
    top_p: Annotated[
        float,
        Option(min=0.001, max=1.0, help="Sample from the likeliest tokens up to this total probability."),
    ] = 1.0,
    greedy: Annotated[bool, Option("--greedy", help="Take the most likely token.")] = False,
    seed: Annotated[int, Option(min=0, help="Of the samples.")] = 0,
) -> None:
    """Stream text from a language model to stdout."""
    with cli_errors():
        from mgk.training.generation import generate as generate_text

        generate_text(
            run,
            prompt,
            on_text=lambda text: typer.echo(text, nl=False),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            seed=seed,
            on_note=lambda text: typer.echo(f"Note: {text}", err=True),
        )
        typer.echo()
