"""Pieces of a page, and the page around them. Every text is escaped here and nowhere else."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True)
class Markup:
    """HTML that is ready; a plain ``str`` is text and gets escaped."""

    html: str


Content = str | Markup


def markup(content: Content) -> str:
    """The HTML of a piece."""
    return content.html if isinstance(content, Markup) else escape(content)


def join(parts: Sequence[Content]) -> Markup:
    """The pieces one after another."""
    return Markup("\n".join(markup(part) for part in parts))


def paragraph(*parts: Content) -> Markup:
    """One paragraph."""
    return Markup(f"<p>{' '.join(markup(part) for part in parts)}</p>")


def code_block(text: str) -> Markup:
    """A command or a file, in a box that scrolls by itself."""
    return Markup(f'<pre tabindex="0"><code>{escape(text)}</code></pre>')


def section(title: str, *parts: Content) -> Markup:
    """A heading and what belongs to it."""
    return Markup(f"<section>\n<h2>{escape(title)}</h2>\n{join(parts).html}\n</section>")


def subheading(text: str) -> Markup:
    """A heading inside a section."""
    return Markup(f"<h3>{escape(text)}</h3>")


def details(summary: str, *parts: Content) -> Markup:
    """What only some readers want: shown when asked for."""
    return Markup(f"<details>\n<summary>{escape(summary)}</summary>\n{join(parts).html}\n</details>")


def facts(pairs: Sequence[tuple[str, Content]]) -> Markup:
    """Names and values, such as who measured what where."""
    rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{markup(value)}</dd>" for name, value in pairs)
    return Markup(f"<dl>\n{rows}\n</dl>")


def table(caption: Content, columns: Sequence[str], rows: Sequence[Sequence[Content]]) -> Markup:
    """A table in a box that scrolls by itself, below its caption; the first column names the row."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        f'<tr><th scope="row">{markup(row[0])}</th>{"".join(f"<td>{markup(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return Markup(
        f"<figure>\n<figcaption>{markup(caption)}</figcaption>\n"
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>\n</figure>"
    )


def figure(picture: Markup, caption: Content) -> Markup:
    """A picture with the sentence below it that says what is seen."""
    return Markup(f"<figure>\n{picture.html}\n<figcaption>{markup(caption)}</figcaption>\n</figure>")


def grid(parts: Sequence[Markup], *, columns: int | None = None) -> Markup:
    """Pieces side by side, as many as fit; or in a number of columns, in a box that scrolls by itself."""
    inner = join(parts).html
    if columns is None:
        return Markup(f'<div class="grid">\n{inner}\n</div>')
    return Markup(
        f'<div class="scroll" tabindex="0"><div class="matrix" style="--columns: {columns}">\n{inner}\n</div></div>'
    )


def png(data: bytes, alt: str) -> Markup:
    """A picture inside the page."""
    encoded = base64.b64encode(data).decode("ascii")
    return Markup(f'<img alt="{escape(alt)}" src="data:image/png;base64,{encoded}">')


def page(title: str, parts: Sequence[Content]) -> str:
    """The whole document: one file, no network, light and dark, from a phone's width up."""
    style = files("mgk.experiments.render").joinpath("style.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{join(parts).html}\n</main>\n</body>\n</html>\n"
    )
