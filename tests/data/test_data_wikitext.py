from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official_layouts import WIKI, pack, write_wikitext

from mgk.data import DataError, UsageError, load_tokens, prepare
from mgk.data.sources import Source, line_pieces
from mgk.data.text_files import cut


def read_vocabulary(folder: Path, build: str) -> list[str]:
    return (folder / build / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.mark.parametrize("archive", [None, "wikitext.zip", "wikitext.tar.gz"])
def test_ids_follow_the_training_text(tmp_path: Path, archive: str | None) -> None:
    source = write_wikitext(tmp_path)
    if archive is not None:
        source = pack(source, tmp_path / archive)
    ready = prepare("wikitext-2", source, out=tmp_path / "out")
    vocabulary = read_vocabulary(ready.folder, ready.manifest.build)
    words = WIKI["train"].decode().replace("\n", " <eos> ").split()
    counts = Counter(words)
    assert set(vocabulary) == set(words)
    assert ready.manifest.facts["vocab_size"] == len(vocabulary) == 11
    assert vocabulary[0] == "<eos>"
    assert [counts[word] for word in vocabulary[1:]] == sorted(
        (counts[word] for word in vocabulary[1:]), reverse=True
    )
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        tokens = load_tokens("wikitext-2", split, folder=tmp_path / "out")
        expected = WIKI[name].decode().replace("\n", " <eos> ").split()
        assert [vocabulary[t] for t in tokens] == [word if word in counts else "<unk>" for word in expected]


def test_folder_and_archive_give_the_same_files(tmp_path: Path) -> None:
    source = write_wikitext(tmp_path)
    first = prepare("wikitext-103", source, out=tmp_path / "a")
    second = prepare("wikitext-103", pack(source, tmp_path / "w.tar.gz"), out=tmp_path / "b")
    for name, spec in first.manifest.files.items():
        assert name == "sources.json" or second.manifest.files[name] == spec


def test_more_than_65536_words_take_a_wider_type(tmp_path: Path) -> None:
    text = " ".join(f"w{number}" for number in range(70_000)).encode() + b"\n"
    source = write_wikitext(tmp_path, {"train": text, "valid": b"w69999 w0\n", "test": b"w1\n"})
    ready = prepare("wikitext-103", source, out=tmp_path / "out")
    assert ready.manifest.facts["vocab_size"] == 70_002  # with <eos> and <unk>
    tokens = load_tokens("wikitext-103", "validation", folder=tmp_path / "out")
    vocabulary = read_vocabulary(ready.folder, ready.manifest.build)
    assert [vocabulary[t] for t in tokens] == ["w69999", "w0", "<eos>"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab \n", max_size=60).map(str.encode), size=st.integers(1, 7))
def test_pieces_are_whole_lines_of_the_same_text(text: bytes, size: int) -> None:
    pieces = list(line_pieces((text[start : start + size] for start in range(0, len(text), size)), "here"))
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces) == (text if not text or text.endswith(b"\n") else text + b"\n")


def test_the_lines_of_a_long_line_are_counted_once() -> None:
    """Joined at every piece, the bytes of a line would be copied again and again."""
    many = [b"a" * 1000] * 16_000
    assert len(b"".join(line_pieces([*many, b"\n"], "here"))) == 16_000_001
    with pytest.raises(DataError, match="here: a line is longer than 16 MiB"):
        list(line_pieces(many + many, "here"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"valid": None}, "wiki.valid.tokens not found"),
        ({"test": b""}, "wiki.test.tokens: the file is empty"),
        ({"train": b"fine \n so \xc3( far \n"}, "wiki.train.tokens: byte 10 (0xc3) is not UTF-8 text"),
    ],
)
def test_bad_files(tmp_path: Path, changes: dict[str, bytes | None], reason: str) -> None:
    source = write_wikitext(
        tmp_path, {name: text for name, text in {**WIKI, **changes}.items() if text is not None}
    )
    with pytest.raises(DataError) as error:
        prepare("wikitext-2", source, out=tmp_path / "out")
    assert reason in str(error.value)
    assert list((tmp_path / "out" / "wikitext-2").iterdir()) == []


PLAIN = "".join(f"line {number} of a small text é\n" for number in range(100)).encode()


@pytest.mark.parametrize("unit", ["byte", "word"])
def test_a_plain_file(tmp_path: Path, unit: str) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(PLAIN.rstrip(b"\n"))
    ready = prepare("plain", file, out=tmp_path / "out", options={"unit": unit, "test_percent": 10})
    parts = [load_tokens("plain", split, folder=tmp_path / "out") for split in ("train", "validation", "test")]
    if unit == "byte":
        assert b"".join(bytes(part.tolist()) for part in parts) == PLAIN.rstrip(b"\n")
        assert ready.manifest.facts["vocab_size"] == 256
    else:
        assert sum(map(len, parts)) == len(PLAIN.split()) + 100
    assert 0.83 < len(parts[0]) / sum(map(len, parts)) < 0.88


@pytest.mark.parametrize(
    ("content", "options", "kind", "reason"),
    [
        (b"", {}, DataError, "book.txt: the file is empty"),
        (b"caf\xe9\n" * 9, {}, DataError, "book.txt: byte 3 (0xe9) is not UTF-8 text"),
        (b"one line", {}, DataError, "too few lines"),
        (PLAIN, {"unit": "letter"}, UsageError, "the unit must be one of byte, word, got 'letter'"),
        (PLAIN, {"test_percent": 95}, UsageError, "must leave a training part"),
    ],
)
def test_bad_plain_files(tmp_path: Path, content: bytes, options, kind: type[Exception], reason: str) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(content)
    with pytest.raises(kind) as error:
        prepare("plain", file, out=tmp_path / "out", options=options)
    assert reason in str(error.value)


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.text(alphabet="aé \n", max_size=9), max_size=40).map("".join),
    shares=st.tuples(st.integers(1, 45), st.integers(1, 45)),
    size=st.integers(1, 30),
)
def test_the_parts_of_a_plain_file_are_the_file(tmp_path_factory, text: str, shares, size: int) -> None:
    file = tmp_path_factory.mktemp("plain") / "book.txt"
    file.write_bytes(text.encode())
    percents = {"train": 100 - sum(shares), "validation": shares[0], "test": shares[1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mgk.data.sources._CHUNK", size)  # the file is not read in one piece
        try:
            files = Source(file).files(r"[^/]+")
            parts = [part for one in files for part in cut(one, len(text.encode()), percents)]
        except DataError:  # of too few lines
            return
    assert b"".join(piece for _, piece in parts) == text.encode()
    names = [split for split, piece in parts if piece]
    assert sorted(names, key=["train", "validation", "test"].index) == names
    assert len(set(names)) == 3
    before = 0
    for split, share in (("validation", 100 - sum(shares)), ("test", 100 - shares[1])):
        before = len(b"".join(piece for name, piece in parts if name not in (split, "test")))
        assert text.encode()[before - 1 : before] == b"\n"
        assert before > len(text.encode()) * share // 100


def test_several_plain_files_are_too_many(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(PLAIN)
    with pytest.raises(UsageError, match="holds several files"):
        prepare("plain", tmp_path, out=tmp_path / "out")
