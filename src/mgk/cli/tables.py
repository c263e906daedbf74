"""Tables in the terminal."""

from collections.abc import Collection, Sequence


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str | None = None,
    left: Collection[int] = (0,),
    whole: int = 1,
    width: int | None = None,
) -> None:
    """Print a table: columns of text, and columns that are not wrapped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left"
    )
    for number, column in enumerate(columns):
        widest = max(map(len, column.split()), default=0)
        table.add_column(column, no_wrap=number < whole, min_width=widest)
        table.columns[-1].justify = "left" if number in left else "right"
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)
