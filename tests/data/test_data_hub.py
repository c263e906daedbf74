"""From the hub, with a stand-in for its library: what it gives is laid out as the official files."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from official_layouts import WIKI, cifar_images, write_pairs

from mgk.data import DataError, UsageError, load, load_tokens
from mgk.data.hub import prepare_from_hub


def stand_in(monkeypatch: pytest.MonkeyPatch, answer) -> list[tuple]:
    module, calls = ModuleType("datasets"), []

    def load_dataset(*arguments):
        calls.append(arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"review {number}", "label": number % 2} for number in range(6)]
    calls = stand_in(monkeypatch, {"train": rows, "test": rows[:4]})
    ready = prepare_from_hub("text", out=tmp_path)
    assert [ready.manifest.examples(split) for split in ("train", "test")] == [6, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert not prepare_from_hub("text", out=tmp_path).is_new
    assert calls == [("stanfordnlp/imdb",)]
    assert int(load("text", "train", folder=tmp_path)[5]["labels"]) == 1


def test_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {}
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        lines = WIKI[name].decode().splitlines(keepends=True)
        splits[split] = [{"text": line if line.strip() else ""} for line in lines]
    stand_in(monkeypatch, splits)
    prepare_from_hub("wikitext-2", out=tmp_path)
    words = WIKI["train"].replace(b"\n", b" <eos> ").split()
    assert len(load_tokens("wikitext-2", "train", folder=tmp_path)) == len(words)


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = cifar_images(10)
    rows = [
        {"img": image.reshape(3, 32, 32).transpose(1, 2, 0), "label": int(label)}
        for image, label in zip(images, labels, strict=True)
    ]
    stand_in(monkeypatch, {"train": rows, "test": rows[:2]})
    prepare_from_hub("image", out=tmp_path, options={"validation": 1})
    pixels = load("image", "test", folder=tmp_path, colour=True)[1]["pixel_values"].numpy()
    assert (pixels * 255).round().astype(np.uint8).reshape(-1).tolist() == images[1].tolist()

    rows = [{"image": np.full((28, 28), number), "label": number} for number in range(10)]
    stand_in(monkeypatch, {"train": rows, "test": rows[:2]})
    prepare_from_hub("mnist", out=tmp_path, options={"validation": 1})
    assert int(load("mnist", "test", folder=tmp_path)[1]["input_ids"][0]) == 1


def test_pairs_of_papers_are_fetched_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(name: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        calls.append((name, repo_type, allow_patterns))
        write_pairs(tmp_path / "cache")
        return str(tmp_path / "cache")

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    ready = prepare_from_hub("retrieval", out=tmp_path / "out")
    assert ready.manifest.examples("validation") == 4
    assert not prepare_from_hub("retrieval", out=tmp_path / "out").is_new
    files = [f"data/aan/new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]
    assert calls == [("OpenNLPLab/lra", "dataset", files)]


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"pathfinder is not at the hub: run: mgk data prepare pathfinder"):
        prepare_from_hub("pathfinder", out=tmp_path)
    stand_in(monkeypatch, ConnectionError("no route to host\nand more"))
    with pytest.raises(
        DataError, match=r"cannot fetch stanfordnlp/imdb \(no route to host\); fetch aclImdb_v1"
    ):
        prepare_from_hub("text", out=tmp_path)
    stand_in(monkeypatch, {"train": []})
    with pytest.raises(DataError, match="the hub's data set has no 'test'"):
        prepare_from_hub("text", out=tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'mgk\[hub\]'"):
        prepare_from_hub("text", out=tmp_path)
    assert list(tmp_path.iterdir()) == []
