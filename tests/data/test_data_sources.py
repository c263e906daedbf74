import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from official_layouts import pack, write_imdb, write_lra_release, write_wikitext

from mgk.data import DataError, UsageError, prepare
from mgk.data.sources import Source


def names(source: Path, pattern: str = r".*\.txt") -> list[str]:
    return [file.name for file in Source(source).files(pattern)]


def hostile_tar(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../harm.txt", "/tmp/mgk-harm.txt", "a/../../harm.txt", "good.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


def hostile_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("../harm.txt", "/tmp/mgk-harm.txt", "a/../../harm.txt", "good.txt"):
            archive.writestr(name, "evil")


@pytest.mark.parametrize(("name", "write"), [("evil.tar.gz", hostile_tar), ("evil.zip", hostile_zip)])
def test_hostile_members_are_passed_over_and_nothing_is_written(tmp_path: Path, name: str, write) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    write(folder / name)
    assert names(folder / name) == ["good.txt"]
    assert [path.name for path in tmp_path.rglob("*")] == ["inner", name]
    assert not Path("/tmp/mgk-harm.txt").exists()


@pytest.mark.parametrize("ending", ["tar.gz", "tar.xz", "zip"])
@pytest.mark.parametrize("part", [0.3, 0.95])
def test_truncated_archives(tmp_path: Path, ending: str, part: float) -> None:
    archive = pack(write_imdb(tmp_path, per_label=20), tmp_path / f"aclImdb.{ending}")
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(DataError) as error:
        prepare("text", archive, out=tmp_path / "out")
    assert str(archive) in str(error.value)
    assert "corrupt or truncated at byte " in str(error.value)
    assert list((tmp_path / "out" / "text").iterdir()) == []


def test_truncation_after_the_last_needed_member_is_noticed(tmp_path: Path) -> None:
    archive = pack(write_wikitext(tmp_path), tmp_path / "wikitext.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-6])
    with pytest.raises(DataError, match="corrupt or truncated at byte"):
        prepare("wikitext-2", archive, out=tmp_path / "out")


@pytest.mark.parametrize("ending", ["tar.gz", "tar.xz", "zip"])
def test_a_changed_byte_in_an_archive(tmp_path: Path, ending: str) -> None:
    archive = pack(write_imdb(tmp_path, per_label=20), tmp_path / f"aclImdb.{ending}")
    data = bytearray(archive.read_bytes())
    place = len(data) // 3
    data[place : place + 8] = bytes(255 - byte for byte in data[place : place + 8])
    archive.write_bytes(data)
    with pytest.raises(DataError):
        prepare("text", archive, out=tmp_path / "out")


@pytest.mark.parametrize("ending", ["tar.gz", "tar.xz", "zip", "gz"])
def test_an_archive_that_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("mgk.data.sources._SMALL", 1 << 20)
    folder = write_wikitext(tmp_path)
    (folder / "wiki.train.tokens").write_bytes(b"a" * (1 << 23))
    source = folder
    if ending == "gz":
        text = (folder / "wiki.train.tokens").read_bytes()
        (folder / "wiki.train.tokens").unlink()
        (folder / "wiki.train.tokens.gz").write_bytes(gzip.compress(text))
    else:
        source = pack(folder, tmp_path / f"wikitext.{ending}")
    with pytest.raises(
        DataError, match=r"it expands more than 200 times: this is not the archive of a data set"
    ):
        prepare("wikitext-2", source, out=tmp_path / "out")
    assert list((tmp_path / "out" / "wikitext-2").iterdir()) == []


def test_lines_and_files_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgk.data.sources._CHUNK", 1 << 10)
    monkeypatch.setattr("mgk.data.sources._MAX_LINE", 1 << 14)
    monkeypatch.setattr("mgk.data.sources._MAX_FILE", 1 << 14)
    source = write_wikitext(tmp_path)
    (source / "wiki.valid.tokens").write_bytes(b"a" * (1 << 15))
    with pytest.raises(DataError, match=r"wiki.valid.tokens: a line is longer than"):
        prepare("wikitext-2", source, out=tmp_path / "out")
    source = write_imdb(tmp_path)
    (source / "train" / "pos" / "0_9.txt").write_bytes(b"a" * (1 << 15))
    with pytest.raises(DataError, match=r"0_9.txt: the file is larger than"):
        prepare("text", source, out=tmp_path / "out")


def test_a_byte_order_mark_is_no_token(tmp_path: Path) -> None:
    mark, source = b"\xef\xbb\xbf", write_imdb(tmp_path)
    plain = prepare("text", source, out=tmp_path / "out").manifest.files["train.tokens.bin"]
    for path in source.rglob("*.txt"):
        path.write_bytes(mark + path.read_bytes())
    assert prepare("text", source, out=tmp_path / "out").manifest.files["train.tokens.bin"] == plain
    for unit in ("byte", "word"):
        sizes = []
        for start in (b"", mark):
            (tmp_path / "text").write_bytes(start + b"one two\nthree\nfour\nfive\n" * 10)
            ready = prepare("plain", tmp_path / "text", out=tmp_path / "out", options={"unit": unit})
            sizes.append([ready.manifest.examples(split) for split in ready.manifest.splits])
        assert sizes[0] == sizes[1]


def test_an_archive_that_is_none(tmp_path: Path) -> None:
    archive = tmp_path / "aclImdb.tar.gz"
    archive.write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match=r"aclImdb.tar.gz: corrupt or truncated at byte \d+"):
        prepare("text", archive, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["reviews.tar", "reviews.tar.bz2", "reviews.7z", "notes.md"])
def test_files_of_another_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UsageError, match=r"is neither a folder, nor an archive \(.tar.gz, .tar.xz, .zip\)"):
        prepare("text", tmp_path / name, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["lra_release.gz", "lra_release.tar.gz", None])
def test_the_release_of_long_range_arena(tmp_path: Path, name: str | None) -> None:
    source = write_lra_release(tmp_path)
    if name is not None:
        source = pack(source, tmp_path / "packed.tar.gz").rename(tmp_path / name)
    counts = {"listops": [3, 3, 3], "retrieval": [4, 4, 4], "pathfinder": [16, 2, 2]}
    for task, expected in counts.items():
        manifest = prepare(task, source, out=tmp_path / "out").manifest
        assert [manifest.examples(split) for split in ("train", "validation", "test")] == expected
        assert not prepare(task, source, out=tmp_path / "out").is_new


def test_progress_is_reported_once_for_what_is_read_ahead(tmp_path: Path) -> None:
    archive = pack(write_imdb(tmp_path, per_label=20), tmp_path / "aclImdb.tar.gz")
    steps = []
    prepare("text", archive, out=tmp_path / "out", on_step=lambda done, total: steps.append((done, total)))
    assert steps == [(archive.stat().st_size, archive.stat().st_size)]


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        prepare("text", tmp_path / "nowhere", out=tmp_path / "out")
    with pytest.raises(UsageError) as error:
        prepare("text", out=tmp_path / "out")
    assert "fetch aclImdb_v1.tar.gz" in str(error.value)
    assert "https://ai.stanford.edu" in str(error.value)
    assert "mgk data prepare text --source PATH" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_no_regular_file(tmp_path: Path) -> None:
    source = write_wikitext(tmp_path)
    (source / "wiki.test.tokens").unlink()
    os.mkfifo(source / "wiki.test.tokens")
    with pytest.raises(DataError, match=r"wiki.test.tokens: this is not a regular file"):
        prepare("wikitext-2", source, out=tmp_path / "out")
