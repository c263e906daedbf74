"""What a release repeats agrees with the one place that it comes from."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml

import mgk
from mgk.training.recipe import read_recipe

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_in_one_place():
    assert mgk.__version__ == version("mgk")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_the_changelog_is_open_for_what_comes():
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])


def test_the_constraints_have_the_ends_of_what_is_promised():
    lowest = next(entry for entry in PROJECT["dependencies"] if entry.startswith("torch"))
    assert re.fullmatch(r"torch>=\d+\.\d+", lowest)
    oldest = (ROOT / "constraints-oldest.txt").read_text()
    assert f"torch=={lowest.removeprefix('torch>=')}.*" in oldest
    assert "torch" in (ROOT / "constraints.txt").read_text()


def test_committed_trials_are_recipes_of_their_models():
    named = re.findall(r"--recipe (results/\S+)", (ROOT / "docs/models.md").read_text())
    assert len(named) == 3
    others = {path.parent: path for path in (ROOT / "results").rglob("trials/*/*/*.json")}
    for path in [*(ROOT / name for name in named), *others.values()]:
        recipe = read_recipe(path)
        assert path.parent.name == recipe.task
        assert path.name.startswith(f"{recipe.model.attention}-{recipe.model.num_attention_heads}h-")


def test_workflows_call_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for command in (step["run"] for step in job["steps"] if "run" in step):
                assert command == ".ci/run" or command.split()[1] in targets, (path.name, command)
