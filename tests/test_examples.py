"""Each example runs from top to bottom, in a process of its own, and leaves what it says."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *options: object, code: int = 0) -> str:
    """What an example prints; of one that fails, its error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, str(EXAMPLES / name), *map(str, options)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> tuple[Path, str]:
    """A model of a file in CSV: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("classifier")
    kinds = {"cold": ("snow, and ice", "frost"), "warm": ("sun, all day", "heat")}
    rows = [
        f'{kind},"{text} {number}"\n' for number in range(20) for kind, texts in kinds.items() for text in texts
    ]
    (folder / "mine.csv").write_text("".join(rows))
    options = ("--file", folder / "mine.csv", "--out", folder / "model", "--steps", 40, "--length", 64)
    return folder / "model", run("classify_your_text.py", *options, "--text", "sun, all day 99")


def test_attention_is_swapped_in_existing_models():
    printed = run("swap_attention.py", "--steps", 150)
    lines = re.findall(r"(.+ heads.*?) +([\d,]+) parameters, output \((.+)\), accuracy ([\d.]+)%", printed)
    names, counts, shapes, accuracies = zip(*lines, strict=True)
    assert names == ("softmax, 4 heads", "mgk, 2 heads, as swapped", "mgk, 2 heads, trained on")
    before, *after = (int(count.replace(",", "")) for count in counts)
    assert max(after) < before
    assert len(set(shapes)) == 1
    swapped, trained = map(float, accuracies[1:])
    assert trained > max(swapped, 50)  # one of 8 answers by chance
    kept = re.search(r"BERT: [\d,]+ parameters kept, 256 added, output \(2, 20, 64\)", printed)
    moved = re.search(r"the output changed by at most (\S+);", printed)
    assert kept
    assert moved
    assert 0 < float(moved[1]) < 1e-3


def test_a_file_becomes_a_classifier(classifier):
    folder, printed = classifier
    assert "64 examples to train on, 16 for the test: cold, warm" in printed
    assert "'sun, all day 99' is warm" in printed
    right = re.search(r"test accuracy: (\d+) of 16", printed)
    assert right
    assert int(right[1]) > 12
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        path.name for path in folder.iterdir()
    }


def test_the_sample_file_is_what_the_example_says(tmp_path):
    printed = run("classify_your_text.py", "--out", tmp_path, "--steps", 1)
    assert "252 examples to train on, 63 for the test: alarm, music, weather" in printed
    assert (tmp_path / "sample.tsv").read_text().count("\t") == 315


def test_a_line_without_a_label_is_told(tmp_path):
    (tmp_path / "mine.tsv").write_text("warm\tsun\nsnow\n")
    error = run("classify_your_text.py", "--file", tmp_path / "mine.tsv", "--out", tmp_path, code=1)
    assert "mine.tsv, line 2: expected a label and a text, got ['snow']" in error


def test_heads_of_two_models_are_inspected(tmp_path):
    printed = run("inspect_heads.py", "--out", tmp_path, "--epochs", 2)
    for name in ("softmax", "mgk"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert len(re.findall(rf"  {name}, layer \d: [\d.]+ of [\d.]+, effective [\d.]+", printed)) == 2
        assert len(re.findall(rf"  {name}, of (?:one layer|different layers): [01]\.\d\d", printed)) == 2
    assert printed.count("positions") == 2 * (4 + 2)
    assert "Attention of softmax and mgk" in (tmp_path / "explore.html").read_text()
    assert (
        len(re.findall(r"  mgk, layer \d, head \d: \d+% and \d+% of the attention, [\d.]+ apart", printed)) == 4
    )


def test_heads_of_a_saved_model_are_inspected(classifier, tmp_path):
    folder, _ = classifier
    texts = ("--text", "snow, and ice", "--text", "heat")
    printed = run("inspect_heads.py", "--model", folder, *texts, "--out", tmp_path)
    assert (tmp_path / "smgk.png").exists()
    assert '"tokens":["s","n","o","w"' in (tmp_path / "explore.html").read_text()
    assert len(re.findall(r"  smgk, layer \d, head \d: \d+% and \d+% of the attention", printed)) == 4


def test_a_table_is_measured(tmp_path):
    printed = run("reproduce_table.py", "--table", "table1", "--out", tmp_path)
    assert "| softmax, 2 heads | 1 |" in printed
    assert re.search(r"Table 1: .*: 4 rows from 4 trials in ", printed)


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES.parent / "tools")
    return importlib.import_module("notebooks")


def test_notebooks_are_current(notebooks):
    for script in sorted(EXAMPLES.glob("*.py")):
        assert script.with_suffix(".ipynb").read_text() == notebooks.text_of(script), "run make notebooks"


def test_a_notebook_has_the_script_in_cells(notebooks):
    script = '"""Do this.\n\nIn detail.\n"""\n\n# %%\nimport sys\n\n# %% 1. A step.\nprint(sys.argv)\n'
    cells = notebooks.notebook(script)["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == [
        ("markdown", "# Do this\n\nIn detail."),
        ("code", notebooks.SET_UP),
        ("code", "import sys"),
        ("markdown", "**1.** A step."),
        ("code", "print(sys.argv)"),
    ]
