"""What the documents say is true: the examples run, and the names and files they cite exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_examples_of_the_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=300)


def test_the_commands_of_the_readme_run(tmp_path):
    """As they stand there, on made-up samples."""
    blocks = re.findall(r"```\n(mgk .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [shlex.split(part) for block in blocks for line in block.splitlines() for part in line.split("&&")]
    assert {command[1] for command in commands} >= {"compare", "train", "eval"}
    folder = next(command[2] for command in commands if command[1] == "eval")
    smaller = {"compare": ["--preset", "smoke", "--seeds", "1"], "train": ["--preset", "smoke", "--out", folder]}
    environment = {**os.environ, "MGK_DATA": str(tmp_path / "data")}
    for _, verb, *options in commands:
        line = [sys.executable, "-m", "mgk", verb, *options, *smaller.get(verb, [])]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_the_examples_of_the_models_run(tmp_path):
    """In one process, in their order: each class goes on with what the examples before it made."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    assert len(blocks) >= 8
    script = tmp_path / "models.py"
    script.write_text("\n".join(blocks))
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=300, cwd=tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_cited_files_and_tests_exist(document):
    text = document.read_text()
    for name, test in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.\w+)(?:::(\w+))?`", text):
        places = [path for path in (ROOT / name, ROOT / "src/mgk" / name, ROOT / "tests" / name) if path.exists()]
        assert places, f"{document.name} cites {name}, which does not exist"
        if test:
            assert f"def {test}(" in places[-1].read_text(), f"{document.name} cites {name}::{test}"
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_demo_runs_for_a_few_steps():
    script = ROOT / "examples/swap_multihead_attention.py"
    result = subprocess.run([sys.executable, str(script), "--steps", "3"], check=True, capture_output=True, text=True)
    assert "MixtureAttention smgk, 2 heads" in result.stdout
