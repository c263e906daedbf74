"""The task `bytes`: any text files, cut into splits; by default the sources of the standard library."""

import json
import platform
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mgk.data import byte_corpus
from mgk.data.datasets import load_tokens
from mgk.data.errors import DataError, UsageError
from mgk.data.manifest import read_record
from mgk.data.preparation import prepare

SPLITS = ("train", "validation", "test")


def texts(folder: Path) -> dict[str, bytes]:
    return {split: load_tokens("bytes", split, folder=folder)[:].tobytes() for split in SPLITS}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def test_one_file_is_cut_at_line_ends_and_comes_back_byte_by_byte(tmp_path):
    text = b"".join(f"line {number} \xc3\xa9\n".encode("latin-1") for number in range(400)) + b"no end"
    source = write(tmp_path / "source", {"book.txt": text}) / "book.txt"
    ready = prepare("bytes", source, out=tmp_path / "data")
    found = texts(tmp_path / "data")
    assert b"".join(found.values()) == text
    assert all(found[split].endswith(b"\n") for split in ("train", "validation"))
    assert abs(len(found["test"]) / len(text) - 0.05) < 0.01
    assert ready.manifest.facts == {**byte_corpus.FACTS, "corpus": "book"}


def test_each_file_of_a_folder_goes_whole_into_one_split(tmp_path):
    files = {f"part{number // 10}/{number:02}.txt": f"<{number:02}>\n".encode() * 50 for number in range(40)}
    source = write(tmp_path / "source", files | {".git/config": b"\xff", "empty.txt": b""})
    prepare("bytes", source, out=tmp_path / "data")
    found = texts(tmp_path / "data")
    for number in range(40):
        assert sum(f"<{number:02}>".encode() in text for text in found.values()) == 1
    assert sum(map(len, found.values())) == sum(map(len, files.values()))
    shares = [len(found[split]) / sum(map(len, found.values())) for split in SPLITS]
    np.testing.assert_allclose(shares, [0.9, 0.05, 0.05], atol=0.01)


def test_of_few_files_each_is_cut(tmp_path):
    files = {"a.txt": b"aaa\n" * 100, "b.txt": b"bbb\n" * 100}
    prepare("bytes", write(tmp_path / "source", files), out=tmp_path / "data")
    assert all(b"aaa" in text and b"bbb" in text for text in texts(tmp_path / "data").values())


def test_files_named_after_the_splits_are_the_splits(tmp_path):
    files = {"wiki.train.tokens": b"aaa\n" * 9, "wiki.valid.tokens": b"bb\n", "wiki.test.tokens": b"c\n"}
    source = write(tmp_path / "source", files)
    with tarfile.open(tmp_path / "wikitext-2.tar.gz", "w:gz") as archive:
        archive.add(source, "wikitext-2")
    for name in (source, tmp_path / "wikitext-2.tar.gz"):
        prepare("bytes", name, out=tmp_path / "data")
        assert list(texts(tmp_path / "data").values()) == list(files.values())


def test_the_standard_library_is_the_source_by_default(tmp_path, monkeypatch):
    library = write(
        tmp_path / "lib",
        {f"module{number}.py": b"import this\n" * 20 for number in range(30)}
        | {
            "test/test_it.py": b"0\n",
            "pkg/tests/x.py": b"0\n",
            "site-packages/other.py": b"0\n",
            "notes.txt": b"0\n",
        }
        | {"idlelib/a.py": b"0\n", "lib2to3/b.py": b"0\n", "pkg/latest.py": b"x = 1\n", "empty.py": b""},
    )
    monkeypatch.setattr(byte_corpus, "default_source", lambda: library)
    monkeypatch.setattr(byte_corpus, "MIN_LIBRARY_BYTES", 1000)
    ready = prepare("bytes", out=tmp_path / "data")
    read = "".join(text.decode() for text in texts(tmp_path / "data").values())
    assert read.count("import this") == 600
    assert "x = 1" in read
    assert "0" not in read
    assert ready.manifest.facts["corpus"] == f"standard library of Python {platform.python_version()}"
    names = {Path(file.path).name for file in read_record(ready.folder, ready.manifest).files}
    assert {"module7.py", "latest.py"} <= names
    assert not names & {"test_it.py", "x.py", "other.py", "a.py", "b.py", "notes.txt"}
    assert not prepare("bytes", out=tmp_path / "data").is_new
    (library / "module0.py").write_bytes(b"import that\n")
    assert prepare("bytes", out=tmp_path / "data").is_new


def test_a_python_with_few_sources_asks_for_a_source(tmp_path, monkeypatch):
    library = write(tmp_path / "lib", {"a.py": b"pass\n", "b.py": b"pass\n"})
    monkeypatch.setattr(byte_corpus, "default_source", lambda: library)
    with pytest.raises(
        UsageError, match=r"this Python has 0\.0 MB of sources in .* 5 MB are wanted: .* --source"
    ):
        prepare("bytes", out=tmp_path / "data")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b""}, "there is no text here"),
        (
            {"a.txt": b"ok\n" * 100, "b.png": b"\x89PNG\xff", "c.txt": b"ok\n"},
            r"b\.png: byte 0 \(0x89\) is not UTF-8",
        ),
        ({"a.txt": b"one\n", "b.txt": b"two\n"}, "a.txt: 4 bytes with too few lines"),
    ],
)
def test_what_is_no_corpus_is_an_error(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        prepare("bytes", write(tmp_path / "source", files), out=tmp_path / "data")


def test_the_manifest_is_json(tmp_path):
    source = write(tmp_path / "source", {"book.txt": b"a line\n" * 100})
    ready = prepare("bytes", source, out=tmp_path / "data")
    assert json.loads((ready.folder / "manifest.json").read_bytes())["facts"]["unit"] == "byte"
