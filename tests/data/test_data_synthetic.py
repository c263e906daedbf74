import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgk.data import TASKS, load, prepare
from mgk.data.inspection import inspect

SAMPLES = [name for name, task in TASKS.items() if task.is_synthetic]


def test_there_is_a_sample_of_every_task() -> None:
    assert {name.removeprefix("synthetic-") for name in SAMPLES} == {n for n in TASKS if n not in SAMPLES}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_made_on_first_use_and_marked(tmp_path: Path, name: str) -> None:
    for split in ("train", "validation", "test"):
        assert len(load(name, split, folder=tmp_path)) > 0
    assert not prepare(name, out=tmp_path).is_new
    manifest, summaries = inspect(name, folder=tmp_path)
    assert manifest.synthetic
    assert manifest.task.startswith("synthetic-")
    assert manifest.sources["files"] == 0
    assert [summary.name for summary in summaries] == ["train", "validation", "test"]
    for summary in summaries:
        assert summary.first
        assert sum(count for _, _, count in summary.histogram) > 0
        if summary.classes:
            assert sum(summary.classes) == summary.examples
            assert len(summary.classes) == TASKS[name].num_labels
    again = prepare(name, out=tmp_path / "again").manifest
    assert again.files == manifest.files
    assert sum(spec.bytes for spec in manifest.files.values()) < 2_000_000


def test_colour_of_the_image_sample(tmp_path: Path) -> None:
    assert load("synthetic-image", "train", folder=tmp_path, colour=True)[0]["pixel_values"].shape == (
        3,
        32,
        32,
    )


def test_importing_the_package_and_preparing_load_no_library_of_the_command_line(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import mgk.data\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "for name in mgk.data.__all__: 'tokenizer' in name or getattr(mgk.data, name)\n"
        "mgk.data.load('synthetic-listops', 'train', folder=Path(sys.argv[1]))\n"
        "print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert not {"typer", "rich", "transformers", "datasets", "mgk.cli"} & set(result.stdout.split())


def test_the_document_has_every_task_and_its_example_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    for name, task in TASKS.items():
        assert task.is_synthetic or f"| `{name}` |" in text
    assert set(re.findall(r"mgk data prepare ([a-z0-9-]+)", text)) == {
        n for n, t in TASKS.items() if not t.is_synthetic
    }
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        environment = {**os.environ, "MGK_DATA": str(tmp_path)}
        subprocess.run([sys.executable, "-c", block], check=True, capture_output=True, env=environment)


def test_unknown_names() -> None:
    import mgk.data

    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        mgk.data.lode  # noqa: B018
    assert set(mgk.data.__all__) == set(dir(mgk.data))
