"""What MkDocs does not do by itself; the pages stay plain Markdown that reads as well without it.

- The changelog and the guide for contributors are pages, made of the files at the root.
- The page of the command line gets every verb and option, from the program itself.
- Links that leave ``docs/`` would lead nowhere on the site. A link to a module whose text is a name in it becomes a
  link to that name in the API reference; of any other such link the text stays.
- A list within a list is indented by two spaces in our files, by four in MkDocs' Markdown.
- Formulas become MathML while the site is built, so that no script and no network is needed to read them.
"""

import posixpath
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

# Page of the site: file at the root.
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

COMMANDS_MARK = "<!-- every verb and option -->"

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files at the root."""
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page(source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the commands and turn links that leave the folder."""
    if COMMANDS_MARK in markdown:
        markdown = markdown.replace(COMMANDS_MARK, "\n\n".join(command_reference()))
    return nested_lists(links_on_site(markdown, page.file.src_uri))


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML."""
    return _FORMULA.sub(_mathml, html)


def root_page(source: str) -> str:
    """A file at the root as a page: what it links to below ``docs/`` is beside it there."""
    return (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")


def links_on_site(markdown: str, page: str) -> str:
    """The Markdown of a page (its path below ``docs/``), no link of which leaves the site."""

    def turned(match: re.Match[str]) -> str:
        text, target, _ = match.groups()
        if re.match(r"\w+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return match[0]
        name = api_name(text, path)
        return text if name is None else f"[{text}][{name}]"

    return _LINK.sub(turned, markdown)


def nested_lists(markdown: str) -> str:
    """Items that stand two spaces in, outside blocks of code, put four spaces in."""
    parts = _FENCE.split(markdown)
    parts[::2] = [re.sub(r"^  (?=[-*] )", "    ", part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


def api_name(text: str, path: str) -> str | None:
    """The full name that a link means by its text, a name in backticks, and its target, a module; None for others."""
    name, module = _NAME.fullmatch(text), re.fullmatch(r"src/(mgk(?:/\w+)*?)(?:/__init__)?\.py", path)
    if name is None or module is None:
        return None
    dotted = module[1].replace("/", ".")
    return name[1] if name[1] == dotted else f"{dotted}.{name[1]}"


def command_reference() -> Iterator[str]:
    """Markdown of all commands, from the program's own help."""
    from typer.main import get_command

    from mgk.cli.app import app

    yield from _command(get_command(app), "mgk", 2)


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    yield f"{'#' * level} `{name}`"
    yield "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    rows = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    if rows:
        yield "\n".join(
            ["| option | meaning |", "| --- | --- |", *(f"| `{a}` | {_cell(b)} |" for a, b in rows)]
        )
    for sub, part in getattr(command, "commands", {}).items():
        yield from _command(part, f"{name} {sub}", min(level + 1, 3))


def _cell(text: str) -> str:
    """Help as the cell of a table, its defaults and bounds as code."""
    text, _, extra = text.partition("  [")
    words = text.replace("|", "\\|").replace("<", "&lt;")
    return f"{words} `[{extra}`" if extra else words


def _mathml(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    found = convert(unescape(match[3]), display="block" if match[2] == "[" else "inline")
    for made, wanted in _TOUCHES.items():
        found = re.sub(made, wanted, found)
    return found


# What print does and the converter does not: norms as high as the line, a space after log, a minus sign close to its
# number, and primes of a readable size in an index.
_TOUCHES = {
    r"<mo>&#x02016;</mo>": r'<mo stretchy="false" lspace="0" rspace="0">&#x02016;</mo>',
    r"<mi>log</mi><m": r'<mi>log</mi><mspace width="0.167em" /><m',
    r"(&#x00028;</mo>)<mo>&#x02212;</mo>": r'\1<mo form="prefix">&#x02212;</mo>',
    r"<msup>(<mi>\w</mi>)<mi>&#x02032;</mi></msup>": r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>',
}
