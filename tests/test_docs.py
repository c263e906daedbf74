"""What the documents say is true: the examples run, and the names and files they cite exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from mgk.cli.app import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_examples_of_the_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=300)


def test_the_commands_of_the_readme_run(tmp_path):
    """As they stand there, on synthetic samples."""
    blocks = re.findall(r"```\n(mgk .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [
        shlex.split(part) for block in blocks for line in block.splitlines() for part in line.split("&&")
    ]
    assert {command[1] for command in commands} >= {"compare", "train", "eval"}
    folder = next(command[2] for command in commands if command[1] == "eval")
    smaller = {
        "compare": ["--preset", "smoke", "--seeds", "1"],
        "train": ["--preset", "smoke", "--out", folder],
    }
    environment = {**os.environ, "MGK_DATA": str(tmp_path / "data")}
    for _, verb, *options in commands:
        line = [sys.executable, "-m", "mgk", verb, *options, *smaller.get(verb, [])]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "count"), [("index", 4), ("models", 8), ("data", 2), ("analysis", 3)])
def test_the_examples_of_a_page_run(page, count, tmp_path):
    """In one process, in their order: each goes on with what the examples before it made."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    assert len(blocks) >= count
    script = tmp_path / f"{page}.py"
    script.write_text("\n".join(blocks))
    environment = {**os.environ, "MGK_DATA": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_exist_with_their_options(document):
    """Inline, at the start of a line of a block, or after ``-m``; what stands beside them, in words, is not read."""
    text = document.read_text()
    inline = re.findall(r"`mgk ([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    shown = re.findall(r"(?:^|-m |&& )mgk ([^&#\n]+?)(?=\s{3}|[&#\n]|$)", blocks, re.MULTILINE)
    for line in [*inline, *shown]:
        command, words = get_command(app), line.split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if hasattr(command, "commands") and words and re.fullmatch(r"[a-z][\w-]*", words[0]):
            raise AssertionError(f"{document.name} shows mgk {line}: there is no verb {words[0]!r}")
        known = {"--help", "--debug"}.union(*([*p.opts, *p.secondary_opts] for p in command.params))
        for option in re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", " ".join(words)):
            assert option in known, f"{document.name} shows mgk {line}: there is no {option}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_cited_files_and_tests_exist(document):
    text = document.read_text()
    for name, test in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.\w+)(?:::(\w+))?`", text):
        places = [
            path for path in (ROOT / name, ROOT / "src/mgk" / name, ROOT / "tests" / name) if path.exists()
        ]
        assert places, f"{document.name} cites {name}, which does not exist"
        if test:
            assert f"def {test}(" in places[-1].read_text(), f"{document.name} cites {name}::{test}"
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
