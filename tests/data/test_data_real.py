"""The real files, where they are at hand: their real counts."""

import os
from pathlib import Path

import numpy as np
import pytest

from mgk.data import DataError, load, load_tokens, prepare

FOLDER = os.environ.get("MGK_TEST_DATA") or None

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="MGK_TEST_DATA is not set to a folder with the real data"
)


def archive(name: str) -> Path:
    path = Path(str(FOLDER)) / name
    if not path.exists():
        pytest.skip(f"{name} is not in MGK_TEST_DATA")
    return path


def counts(ready) -> dict[str, int]:
    return {split: ready.manifest.examples(split) for split in ready.manifest.splits}


def test_imdb(tmp_path: Path) -> None:
    assert counts(prepare("text", archive("aclImdb.tar.xz"), out=tmp_path)) == {"train": 25_000, "test": 25_000}
    for split in ("train", "test"):
        data = load("text", split, folder=tmp_path, max_length=20_000)
        assert sum(int(data[i]["labels"]) for i in range(0, 25_000, 10)) == 1_250
        assert 1_250 < data.lengths.mean() < 1_400


def test_wikitext_2(tmp_path: Path) -> None:
    ready = prepare("wikitext-2", archive("wikitext-2.tar.gz"), out=tmp_path)
    assert ready.manifest.facts["vocab_size"] == 33_278
    words = {"train": 2_051_910, "validation": 213_886, "test": 241_211}
    for split, expected in words.items():
        tokens = load_tokens("wikitext-2", split, folder=tmp_path)
        assert np.count_nonzero(tokens) == expected  # 0 is <eos>
    assert counts(ready) == {"train": 2_088_628, "validation": 217_646, "test": 245_569}


def test_wikitext_103_without_its_training_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wiki.train.tokens not found"):
        prepare("wikitext-103", archive("wikitext-103-valid-test.tar.gz"), out=tmp_path)


def test_pairs_of_papers(tmp_path: Path) -> None:
    ready = prepare("retrieval", archive("peerread_pairs.tar.xz"), out=tmp_path)
    assert counts(ready) == {"train": 6_400, "validation": 800, "test": 800}
    data = load("retrieval", "test", folder=tmp_path)
    assert data.lengths.max() == 4_000
    assert {int(data[i]["labels"]) for i in range(100)} == {0, 1}


@pytest.mark.parametrize(
    ("name", "per_class"), [("mnist", [980, 1135, 1032]), ("fashion-mnist", [1000, 1000, 1000])]
)
def test_idx_files(tmp_path: Path, name: str, per_class: list[int]) -> None:
    """The folder of the four files, packed as they are published."""
    ready = prepare(name, archive(name), out=tmp_path)
    assert counts(ready) == {"train": 54_000, "validation": 6_000, "test": 10_000}
    labels = [int(load(name, "test", folder=tmp_path)[i]["labels"]) for i in range(10_000)]
    assert np.bincount(labels)[:3].tolist() == per_class


def test_cifar_10(tmp_path: Path) -> None:
    found = sorted(Path(str(FOLDER)).glob("cifar-10-*"))
    if not found:
        pytest.skip("CIFAR-10 is not in MGK_TEST_DATA")
    assert counts(prepare("image", found[0], out=tmp_path)) == {
        "train": 45_000,
        "validation": 5_000,
        "test": 10_000,
    }
    data = load("image", "train", folder=tmp_path, colour=True)
    assert [int(data[i]["labels"]) for i in range(4)] == [6, 9, 9, 4]
    assert (data[0]["pixel_values"][0, 0, :4] * 255).round().tolist() == [59, 43, 50, 68]
