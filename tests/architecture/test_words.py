"""Phrases and identifiers that were replaced by the field's own and must not come back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PHRASES = (
    "luck of",
    "may be luck",
    "without looking",
    "not seen at this scale",
    "yardstick",
    "made-up",
    "likeness",
    "alike by",
    "as if nobody",
    "nobody sees",
    "gradients are shortened",
    "words that ranks exchange",
    "last words to",
    "sum does not tell",
    "the sums err",
    "free of torch",
    ": as there",
    "whatever is said here",
    "telling task",
    "silent task",
    "narrow start",
    "the paper's start",
    "without a word",
    "unkind moment",
)
IDENTIFIERS = (
    "Bilinear",
    "Contender",
    "_Conductor",
    "catalogue",
    "checked_call",
    "claim_folder",
    "contenders",
    "counted_once",
    "from_first",
    "harvest",
    "is_padded",
    "likeness",
    "PICTURES_PER_BLOCK",
    "data_pictures",
    "made_up",
    "over_ranks",
    "read_sealed",
    "refusal",
    "seal",
    "told",
    "write_sealed",
    "yardstick",
)
OPTIONS = ("--matrices", "--markdown", "--plain")
# What was written at the time: the history of changes, a committed plan, and this list.
EXEMPT = ("CHANGELOG.md", "results/initialisation/plan.yaml", "tests/architecture/test_words.py")


def texts() -> dict[str, str]:
    """The files that git tracks and people read."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kinds = (".py", ".md", ".h", ".cpp", ".yaml", ".yml", ".toml")
    found = {name: ROOT / name for name in names if name.endswith(kinds) or name == "Makefile"}
    return {
        name: path.read_text("utf-8") for name, path in found.items() if name not in EXEMPT and path.is_file()
    }


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is not known")
    return texts()


@pytest.mark.parametrize(
    "pattern",
    [
        *(re.escape(phrase) for phrase in PHRASES),
        *(rf"\b{name}\b" for name in IDENTIFIERS),
        *(rf"{option}\b" for option in OPTIONS),
    ],
)
def test_replaced_words_do_not_come_back(pattern, files):
    expression = re.compile(pattern, re.IGNORECASE if " " in pattern or "-" in pattern else 0)
    places = [
        f"{name}:{number}: {line.strip()}"
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if expression.search(line)
    ]
    assert not places, "\n".join(places)
