"""The site: every page has its place, what it names exists, and it builds without a warning and needs no network."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from typer.main import get_command

from mgk.cli.app import app
from mgk.experiments.reproduce.registry import EXPERIMENTS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAPER = (DOCS / "paper-to-code.md").read_text()
PUBLIC = ("mgk", "mgk.nn", "mgk.models", "mgk.data", "mgk.training")
EQUATIONS, REMARKS, TABLES, FIGURES = 14, 3, 4, 8


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("site_hook", DOCS / "hooks" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav):
    for entry in nav:
        (target,) = entry.values()
        if isinstance(target, str):
            yield target
        else:
            yield from pages_of(target)


def test_every_page_is_in_the_navigation_once(hook):
    pages = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    files = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(pages) == sorted([*files, *hook.ROOT_PAGES])


@pytest.mark.parametrize(
    ("kind", "count"),
    [("Eq.", EQUATIONS), ("Remark", REMARKS), ("Table", TABLES), ("Figure", FIGURES)],
    ids=["equations", "remarks", "tables", "figures"],
)
def test_all_of_the_paper_has_a_place_in_the_code(kind, count):
    places = "\n".join(line for line in PAPER.splitlines() if line.startswith(("### ", "| Table", "| Figure")))
    found = {int(number) for number in re.findall(rf"{re.escape(kind)} (\d+)", places)}
    assert found == set(range(1, count + 1))


def test_tables_and_figures_have_their_commands():
    ours = {name for name, experiment in EXPERIMENTS.items() if experiment.is_ours}
    assert set(re.findall(r"mgk reproduce (\w+)", PAPER)) == set(EXPERIMENTS) - ours


def test_names_that_stand_for_the_paper_exist(hook):
    links = re.findall(r"\[(`[^`\]]+`)\]\(\.\./(src/[^)]+)\)", PAPER)
    assert len(links) > 40
    for text, path in links:
        name = hook.api_name(text, path)
        assert name is not None, f"{text} links to {path}, which is not its module"
        assert found(name) is not None, name


def found(name):
    """What a dotted name stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            place = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            place = getattr(place, part)
        return place
    raise ImportError(name)


@pytest.mark.parametrize(
    ("markdown", "page", "wanted"),
    [
        ("[data](data.md)", "index.md", "[data](data.md)"),
        ("[data](../data.md#ids)", "reference/data.md", "[data](../data.md#ids)"),
        ("[x](https://example.org/a)", "index.md", "[x](https://example.org/a)"),
        ("![map](images/map.png)", "index.md", "![map](images/map.png)"),
        ("[the licence](../LICENSE)", "index.md", "the licence"),
        ("[`tests/a.py`](../tests/a.py)", "index.md", "`tests/a.py`"),
        (
            "[`rank`](../src/mgk/analysis/attention_rank.py)",
            "index.md",
            "[`rank`][mgk.analysis.attention_rank.rank]",
        ),
        ("[`mgk.nn`](../../src/mgk/nn/__init__.py)", "reference/nn.md", "[`mgk.nn`][mgk.nn]"),
    ],
)
def test_links_that_leave_the_folder(hook, markdown, page, wanted):
    assert hook.links_on_site(markdown, page) == wanted


def test_lists_within_lists_are_indented_outside_code(hook):
    fence = "```\n- a\n  - b\n```"
    assert hook.nested_lists(f"- a\n  - b\n\n{fence}\n- c\n  - d") == f"- a\n    - b\n\n{fence}\n- c\n    - d"


def commands(command, name="mgk"):
    yield name, command
    for sub, part in getattr(command, "commands", {}).items():
        yield from commands(part, f"{name} {sub}")


def test_the_command_line_has_every_verb_and_option(hook):
    text = "\n".join(hook.command_reference())
    for name, command in commands(get_command(app)):
        assert f"# `{name}`\n" in text
        for parameter in command.params:
            for option in parameter.opts:
                assert option in text or not option.startswith("-"), f"{name} {option}"


class Parts(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, html):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        loaded = given.get("href") if tag == "link" else given.get("src")
        if loaded:
            self.loaded.append(loaded)


def test_the_site_builds_strictly_and_needs_no_network(tmp_path):
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    site = {path: Parts(path.read_text()) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    for path, page in site.items():
        for address in page.loaded:
            assert not urlsplit(address).netloc, f"{path.name} loads {address}"
        for address in page.links:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.exists(), f"{path.name} links to {address}"
            if url.fragment and target in site:
                assert unquote(url.fragment) in site[target].anchors, f"{path.name} links to {address}"

    mathematics = (tmp_path / "mathematics.html").read_text()
    assert "<math" in mathematics
    assert "arithmatex" not in mathematics
    assert "The reference is the judge" in (tmp_path / "contributing.html").read_text()
    anchors = set().union(*(page.anchors for page in site.values()))
    for module in PUBLIC:
        names = set(importlib.import_module(module).__all__) - {"__version__"}
        assert {f"{module}.{name}" for name in names} <= anchors
