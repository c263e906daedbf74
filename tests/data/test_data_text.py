from pathlib import Path

import pytest
from official_layouts import pack, write_imdb, write_pairs

from mgk.data import DataError, UsageError, load, prepare


@pytest.mark.parametrize("archive", [None, "aclImdb.tar.gz", "aclImdb.tar.xz", "aclImdb.zip"])
def test_reviews_from_folder_and_archives(tmp_path: Path, archive: str | None) -> None:
    source = write_imdb(tmp_path)
    if archive is not None:
        source = pack(source, tmp_path / archive)
    ready = prepare("text", source, out=tmp_path / "out")
    assert {split: ready.manifest.examples(split) for split in ready.manifest.splits} == {"train": 6, "test": 6}
    data = load("text", "train", folder=tmp_path / "out")
    assert [int(data[i]["labels"]) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert bytes(t - 1 for t in data[5]["input_ids"].tolist()) == "train pos review 2 é".encode()
    assert int(data[5]["input_ids"].min()) >= 1
    assert ready.manifest.facts == {"unit": "byte", "vocab_size": 257, "pad_id": 0, "shift": 1}


def test_reviews_in_two_places(tmp_path: Path) -> None:
    """A copy is passed over; two different ones of a number are an error, not twice as many reviews."""
    write_imdb(tmp_path / "a")
    other = write_imdb(tmp_path / "b")
    ready = prepare("text", tmp_path, out=tmp_path / "out")
    assert ready.manifest.examples("train") == 6
    (other / "train" / "pos" / "1_9.txt").write_text("other")
    with pytest.raises(DataError, match=r"b/aclImdb/train/pos/1_9.txt: a second review of the number 1"):
        prepare("text", tmp_path, out=tmp_path / "out")


def test_validation_is_held_out_balanced_and_seeded(tmp_path: Path) -> None:
    source = write_imdb(tmp_path, per_label=10)
    ready = prepare("text", source, out=tmp_path / "out", options={"validation": 6})
    sizes = {split: ready.manifest.examples(split) for split in ready.manifest.splits}
    assert sizes == {"train": 14, "validation": 6, "test": 20}
    held_out = load("text", "validation", folder=tmp_path / "out")
    assert sum(int(held_out[i]["labels"]) for i in range(6)) == 3
    other = prepare("text", source, out=tmp_path / "other", options={"validation": 6, "seed": 1})
    assert other.manifest.files["validation.tokens.bin"] != ready.manifest.files["validation.tokens.bin"]
    with pytest.raises(UsageError, match="cannot hold out 10 of the 10 training reviews"):
        prepare("text", source, out=tmp_path / "third", options={"validation": 20})


def test_without_validation_the_error_says_what_to_do(tmp_path: Path) -> None:
    prepare("text", write_imdb(tmp_path), out=tmp_path / "out")
    with pytest.raises(UsageError, match="no split 'validation', only train, test; LRA uses 'test'"):
        load("text", "validation", folder=tmp_path / "out")


def break_review(name: str, content: bytes):
    def act(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return act


def remove_split(folder: Path) -> None:
    for path in (folder / "test" / "neg").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (
            break_review("train/pos/1_9.txt", b"fine \xff\xfe"),
            "train/pos/1_9.txt: byte 5 (0xff) is not UTF-8 text",
        ),
        (break_review("train/neg/7_9.txt", b"x"), "train/neg/7_9.txt: a rating of 9 is out of range"),
        (break_review("test/pos/8_10.txt", b""), "test/pos/8_10.txt: the review is empty"),
        (remove_split, "no review test/neg/ID_RATING.txt found"),
    ],
)
def test_bad_reviews(tmp_path: Path, act, reason: str) -> None:
    source = write_imdb(tmp_path)
    act(source)
    with pytest.raises(DataError) as error:
        prepare("text", source, out=tmp_path / "out")
    assert reason in str(error.value)
    assert list((tmp_path / "out" / "text").iterdir()) == []


@pytest.mark.parametrize("archive", [None, "lra.tar.gz"])
def test_pairs(tmp_path: Path, archive: str | None) -> None:
    source = write_pairs(tmp_path)
    if archive is not None:
        source = pack(source, tmp_path / archive)
    prepare("retrieval", source, out=tmp_path / "out")
    data = load("retrieval", "validation", folder=tmp_path / "out")
    assert len(data) == 4
    assert [int(data[i]["labels"]) for i in range(4)] == [0, 1, 0, 1]
    assert bytes(t - 1 for t in data[2]["input_ids"].tolist()) == b'first "eval" text 2'
    assert bytes(t - 1 for t in data[2]["input_ids_2"].tolist()) == b"second text, 2"
    assert data.lengths.tolist() == [19] * 4
    short = load("retrieval", "validation", folder=tmp_path / "out", max_length=15)
    assert [len(short[0][name]) for name in ("input_ids", "input_ids_2")] == [15, 14]


GOOD = "1.0\ta\tb\tone\ttwo\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD + "1.0\ta\tb\tone\n", "new_aan_pairs.eval.tsv, line 2: 4 columns instead of 5 (label, id1"),
        (
            GOOD + GOOD + "1.0\ta\tb\tone\ttwo\tthree\n",
            "new_aan_pairs.eval.tsv, line 3: 6 columns instead of 5",
        ),
        ("2.0\ta\tb\tone\ttwo\n", "new_aan_pairs.eval.tsv, line 1: the label must be 0 or 1, got b'2.0'"),
        (GOOD + "0\ta\tb\tone\t\n", "new_aan_pairs.eval.tsv, line 2: one of the two texts is empty"),
        (GOOD + "0\ta\tb\tone\tt\udcffo\n", "new_aan_pairs.eval.tsv, line 2: byte 11 (0xff) is not UTF-8 text"),
        ("", "new_aan_pairs.eval.tsv: the file is empty"),
        (None, "new_aan_pairs.eval.tsv not found"),
    ],
)
def test_bad_pairs(tmp_path: Path, text: str | None, reason: str) -> None:
    source = write_pairs(tmp_path)
    path = source / "new_aan_pairs.eval.tsv"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as error:
        prepare("retrieval", source, out=tmp_path / "out")
    assert reason in str(error.value)
    assert list((tmp_path / "out" / "retrieval").iterdir()) == []


def test_two_files_for_one_split(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a")
    other = write_pairs(tmp_path / "b")
    assert prepare("retrieval", tmp_path, out=tmp_path / "out").manifest.examples("train") == 4
    (other / "new_aan_pairs.eval.tsv").write_text(GOOD)
    with pytest.raises(
        DataError, match=r"b/.*eval.tsv: this is not the same as a/tsv_data/new_aan_pairs.eval.tsv"
    ):
        prepare("retrieval", tmp_path, out=tmp_path / "out")
