"""HTML elements and the page around them.

``markupsafe`` escapes every ``str``; only a ``Markup`` is taken as HTML.
"""

import base64
from collections.abc import Iterable, Sequence
from importlib.resources import files

from markupsafe import Markup


def join(parts: Iterable[str], separator: str = "\n") -> Markup:
    """The elements one after another."""
    return Markup(separator).join(parts)


def paragraph(*parts: str) -> Markup:
    """One paragraph."""
    return Markup("<p>{}</p>").format(join(parts, " "))


def code_block(text: str) -> Markup:
    """A command or a file, in a box that scrolls."""
    return Markup('<pre tabindex="0"><code>{}</code></pre>').format(text)


def section(title: str, *parts: str) -> Markup:
    """A heading and what belongs to it."""
    return Markup("<section>\n<h2>{}</h2>\n{}\n</section>").format(title, join(parts))


def subheading(text: str) -> Markup:
    """A heading inside a section."""
    return Markup("<h3>{}</h3>").format(text)


def details(summary: str, *parts: str) -> Markup:
    """Content that is folded until it is opened."""
    return Markup("<details>\n<summary>{}</summary>\n{}\n</details>").format(summary, join(parts))


def definitions(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Names and their values."""
    rows = (Markup("<dt>{}</dt><dd>{}</dd>").format(name, value) for name, value in pairs)
    return Markup("<dl>\n{}\n</dl>").format(join(rows))


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A caption and a table in a box that scrolls."""
    head = join((Markup('<th scope="col">{}</th>').format(column) for column in columns), "")
    body = (
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            name, join(map(Markup("<td>{}</td>").format, cells), "")
        )
        for name, *cells in rows
    )
    return Markup(
        '<figure>\n<figcaption>{}</figcaption>\n<div class="scroll" tabindex="0"><table>\n<thead><tr>{}</tr></thead>\n'
        "<tbody>\n{}\n</tbody>\n</table></div>\n</figure>"
    ).format(caption, head, join(body))


def figure(image: Markup, caption: str) -> Markup:
    """An image with its caption below."""
    return Markup("<figure>\n{}\n<figcaption>{}</figcaption>\n</figure>").format(image, caption)


def grid(parts: Iterable[str], *, columns: int | None = None) -> Markup:
    """Elements side by side, or in columns in a box that scrolls."""
    if columns is None:
        return Markup('<div class="grid">\n{}\n</div>').format(join(parts))
    return Markup(
        '<div class="scroll" tabindex="0"><div class="matrix" style="--columns: {}">\n{}\n</div></div>'
    ).format(columns, join(parts))


def png(data: bytes, alt: str) -> Markup:
    """An image inside the page."""
    content = base64.b64encode(data).decode("ascii")
    return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(alt, content)


def page(
    title: str, parts: Iterable[str], *, styles: Sequence[str] = ("style.css",), scripts: Sequence[str] = ()
) -> str:
    """The whole document, with its style sheets and scripts."""
    folder = files("mgk.experiments.render")
    style, script = (
        "".join(folder.joinpath(name).read_text("utf-8") for name in names) for names in (styles, scripts)
    )
    element = Markup(f"<script>\n{script}</script>\n" if script else "")
    template = Markup(folder.joinpath("page.html").read_text("utf-8"))
    document = template.format(title, Markup(style), join(parts), element)
    return str(document)  # not Markup, whose methods escape their arguments
