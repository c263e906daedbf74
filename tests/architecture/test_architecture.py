"""The structure that docs/architecture.md describes: layers, the picture of them, short walks, one name a thing."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mgk"
# Modules that share a name because they are the same part of different packages.
SAME_PART = {"__init__", "api", "errors", "feature_maps", "inputs", "page", "reference", "registry", "runner"}


def test_layers_are_kept():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_no_import_is_ignored():
    assert "ignore_imports" not in (ROOT / "pyproject.toml").read_text()


def test_the_picture_of_the_packages_is_current():
    spec = importlib.util.spec_from_file_location("package_graph", ROOT / "docs" / "hooks" / "package_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PICTURE.read_text() == module.current(), "run python docs/hooks/package_graph.py"


def test_every_file_that_the_page_names_exists():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    names = re.findall(r"`([\w./]+\.(?:py|h|toml|yaml|md))`", page)
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("[!.]*/**/*.*")]
    assert len(names) > 40
    assert not [name for name in names if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("walk", ["attention", "train", "reproduce"])
def test_a_call_crosses_few_files(walk):
    script = Path(__file__).with_name("walks.py")
    done = subprocess.run([sys.executable, script, "--json", walk], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)[walk]
    assert len(found["files"]) <= found["limit"], found["files"]


def test_no_two_modules_have_one_name():
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in SAME_PART:
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    # a verb of the command line is named after what it runs
    shared = {name: [file for file in files if not file.startswith("cli/")] for name, files in places.items()}
    assert not {name: files for name, files in shared.items() if len(files) > 1}
