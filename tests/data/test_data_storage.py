"""Prepared once: the second time is instant, corruption is named, and an interruption leaves the old set."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official_layouts import WIKI, write_imdb, write_wikitext

from mgk.data import DataError, SequenceDataset, UsageError, load, load_tokens, prepare
from mgk.data.listops import write_official
from mgk.data.manifest import read_manifest, verify
from mgk.data.splits import Split
from mgk.data.text import BYTES
from mgk.data.writer import Example, writing


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_second_time_writes_nothing(tmp_path: Path) -> None:
    source = write_imdb(tmp_path)
    assert prepare("text", source, out=tmp_path / "out").is_new
    before = snapshot(tmp_path / "out")
    again = prepare("text", source, out=tmp_path / "out")
    assert not again.is_new
    assert not prepare("text", out=tmp_path / "out").is_new  # without the source, too
    assert snapshot(tmp_path / "out") == before


def test_the_manifest_says_what_it_was_made_from(tmp_path: Path) -> None:
    source = write_wikitext(tmp_path)
    ready = prepare("wikitext-2", source, out=tmp_path / "out")
    written = json.loads((ready.folder / "manifest.json").read_text())
    assert written["options"] == {}
    assert written["sources"] == {"files": 3, "bytes": sum(map(len, WIKI.values()))}
    assert written["synthetic"] is False
    sources = json.loads((ready.folder / ready.manifest.build / "sources.json").read_text())
    assert sources["root"] == str(source)
    assert {Path(item["path"]).name for item in sources["files"]} == {f"wiki.{name}.tokens" for name in WIKI}
    assert all(len(item["sha256"]) == 64 for item in sources["files"])


def test_a_changed_source_is_named_and_read_anew(tmp_path: Path) -> None:
    source = write_wikitext(tmp_path)
    first = prepare("wikitext-2", source, out=tmp_path / "out")
    path = source / "wiki.valid.tokens"
    content = path.read_bytes()
    path.write_bytes(content)  # a new time, the same content
    assert not prepare("wikitext-2", source, out=tmp_path / "out").is_new
    path.write_bytes(content.replace(b"bird", b"bear"))
    again = prepare("wikitext-2", source, out=tmp_path / "out")
    assert again.is_new
    assert again.reasons == [f"{path}: this source file has changed"]
    assert [p.name for p in sorted(first.folder.iterdir())] == sorted([again.manifest.build, "manifest.json"])


def test_files_that_are_new_or_gone_and_another_source(tmp_path: Path) -> None:
    source = write_imdb(tmp_path)
    prepare("text", source, out=tmp_path / "out")
    path = source / "train" / "neg" / "77_1.txt"
    path.write_text("another review")
    (source / "train" / "labeledBow.feat").write_text("not a review")
    again = prepare("text", source, out=tmp_path / "out")
    assert again.reasons == [f"{path}: this source file is new"]
    assert again.manifest.examples("train") == 7
    path.unlink()
    again = prepare("text", source, out=tmp_path / "out")
    assert again.reasons == [f"{path}: this source file is gone"]
    moved = source.rename(tmp_path / "moved")
    again = prepare("text", moved, out=tmp_path / "out")
    assert again.reasons == [f"{moved}: the set was made from {source}"]
    assert not prepare("text", moved, out=tmp_path / "out").is_new


def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_wikitext(tmp_path)

    def finish(encoder: object) -> None:
        (source / "wiki.test.tokens").write_bytes(b"something else \n")

    monkeypatch.setattr("mgk.data.words.WordEncoder.finish", finish)
    with pytest.raises(DataError, match=r"wiki.test.tokens: this source file was changed while it was read"):
        prepare("wikitext-2", source, out=tmp_path / "out")
    assert list((tmp_path / "out" / "wikitext-2").iterdir()) == []


def test_files_are_read_once_in_a_process_unless_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepare("synthetic-text", out=tmp_path)
    path = ready.folder / ready.manifest.build / "train.tokens.bin"
    monkeypatch.setattr("mgk._util.files._SETTLED_NS", 0)
    load("synthetic-text", "train", folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("mgk._util.files.file_hash", lambda path: pytest.fail(f"{path} is read again"))
        load("synthetic-text", "train", folder=tmp_path)
    status = path.stat()
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"train.tokens.bin: .* has changed"):
        load("synthetic-text", "train", folder=tmp_path)


def test_no_flip_of_a_bit_in_the_manifest_changes_the_data(tmp_path: Path) -> None:
    ready = prepare("synthetic-listops", out=tmp_path)
    path = ready.folder / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        spoiled = bytearray(content)
        spoiled[place] ^= 1 << place % 8
        path.write_bytes(spoiled)
        with suppress(DataError):
            assert read_manifest(ready.folder) == ready.manifest


def test_other_options_prepare_anew(tmp_path: Path) -> None:
    source = write_imdb(tmp_path)
    prepare("text", source, out=tmp_path / "out")
    again = prepare("text", source, out=tmp_path / "out", options={"validation": 2})
    assert again.is_new
    assert again.reasons == [f"{again.folder}: prepared with other options"]


def test_a_corrupt_file_is_noticed_and_named(tmp_path: Path) -> None:
    source = write_wikitext(tmp_path)
    ready = prepare("wikitext-2", source, out=tmp_path / "out")
    path = ready.folder / ready.manifest.build / "train.tokens.bin"
    content = path.read_bytes()

    path.write_bytes(content[:-2])
    with pytest.raises(
        DataError, match=r"train.tokens.bin: .* has \d+ bytes instead of \d+; prepare wikitext-2 anew"
    ):
        load("wikitext-2", "train", folder=tmp_path / "out")

    path.write_bytes(b"\1" + content[1:])
    with pytest.raises(DataError, match=r"train.tokens.bin: this file .* has changed: its SHA-256"):
        load("wikitext-2", "train", folder=tmp_path / "out")
    again = prepare("wikitext-2", source, out=tmp_path / "out")
    assert again.is_new
    assert "train.tokens.bin: this file of the prepared set has changed" in again.reasons[0]
    assert path.read_bytes() == content

    status = path.stat()
    path.write_bytes(b"\1" + content[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as after a fault of the disk
    assert len(verify(again.folder, again.manifest)) == 1

    path.unlink()
    with pytest.raises(DataError, match=r"train.tokens.bin: this file of the prepared set is missing"):
        load("wikitext-2", "train", folder=tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99}', '{"format": 3}', '{"format": 3, "splits": 3}']
)
def test_a_corrupt_manifest(tmp_path: Path, text: str) -> None:
    source = write_wikitext(tmp_path)
    ready = prepare("wikitext-2", source, out=tmp_path / "out")
    (ready.folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest.json: this"):
        load("wikitext-2", "train", folder=tmp_path / "out")
    assert prepare("wikitext-2", source, out=tmp_path / "out").is_new


def test_absent_sets_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load("retrieval", "train", folder=tmp_path)
    assert "fetch new_aan_pairs.{train,eval,test}.tsv from https://huggingface.co/" in str(error.value)
    assert "or copy it from where it is, then run: mgk data prepare retrieval --source PATH; " in str(
        error.value
    )
    assert str(error.value).endswith("synthetic-retrieval is a sample that is generated (preset smoke)")
    with pytest.raises(DataError, match=r"run: mgk data prepare listops$"):
        load("listops", "train", folder=tmp_path)


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no task 'listop': did you mean 'listops'"):
        prepare("listop", out=tmp_path)
    with pytest.raises(UsageError, match="text has no option 'train'; it has seed, validation"):
        prepare("text", write_imdb(tmp_path), out=tmp_path / "out", options={"train": 3})
    with pytest.raises(UsageError, match="listops read from files has no option 'train'; it has none"):
        prepare("listops", tmp_path, out=tmp_path / "out", options={"train": 3})
    with pytest.raises(UsageError, match="must be a whole number, 0 or more, got -1"):
        prepare("listops", out=tmp_path / "out", options={"train": -1})
    with pytest.raises(UsageError, match="max_length must be at least 1"):
        load("synthetic-text", "train", folder=tmp_path, max_length=0)


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who may not do everything, where the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_unwritable_folders(open_folder: Path) -> None:
    source = write_wikitext(open_folder)
    (open_folder / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write '.*file/wikitext-2': Not a directory"):
        prepare("wikitext-2", source, out=open_folder / "file")
    closed = open_folder / "closed"
    closed.mkdir(mode=0o555)
    with (
        without_rights(),
        pytest.raises(DataError, match=r"cannot write '.*closed/wikitext-2': Permission denied"),
    ):
        prepare("wikitext-2", source, out=closed)
    assert list(closed.iterdir()) == []
    with without_rights(), pytest.raises(DataError, match=r"cannot write '.*closed/tsv': Permission denied"):
        write_official(iter([]), closed / "tsv")


@pytest.mark.parametrize("name", ["wiki.valid.tokens", ""])
def test_unreadable_sources(open_folder: Path, name: str) -> None:
    """A file, and a whole folder, whose files must not silently be passed over."""
    inner = open_folder / "all"
    source = write_wikitext(inner)
    out = open_folder / "out"
    out.mkdir()
    out.chmod(0o777)
    (source / name).chmod(0)
    with without_rights(), pytest.raises(DataError, match=rf"wikitext/?{name}: Permission denied"):
        prepare("wikitext-2", inner, out=out)
    (source / name).chmod(0o755)
    assert list((out / "wikitext-2").iterdir()) == []


FILES = [
    "train.scratch",
    "test.scratch",
    "train.tokens.bin",
    "test.tokens.bin",
    "vocabulary.txt",
    "sources.json",
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_leaves_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whichever file it is that has no room: what the job writes there goes to a device that is always full."""
    source = write_wikitext(tmp_path)
    prepare("wikitext-2", source, out=tmp_path / "out")
    before = snapshot(tmp_path / "out")
    (source / "wiki.test.tokens").write_bytes(b"new \n")
    make = tempfile.mkdtemp

    def with_full_file(**options: str) -> str:
        folder = make(**options)
        (Path(folder) / name).symlink_to("/dev/full")
        return folder

    monkeypatch.setattr("mgk.data.writer.tempfile.mkdtemp", with_full_file)
    with pytest.raises(DataError, match=rf"cannot write '.*{name}': No space left on device"):
        prepare("wikitext-2", source, out=tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    assert len(list((tmp_path / "out" / "wikitext-2").iterdir())) == 2


def test_a_full_disk_for_the_manifest_leaves_the_old_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_wikitext(tmp_path)
    prepare("wikitext-2", source, out=tmp_path / "out")
    before = snapshot(tmp_path / "out")
    (source / "wiki.test.tokens").write_bytes(b"new \n")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mgk.data.writer.write_hashed", full)
    with pytest.raises(DataError, match=r"cannot write '.*wikitext-2': No space left on device"):
        prepare("wikitext-2", source, out=tmp_path / "out")
    assert {name: before[name] for name in before} == {
        name: snapshot(tmp_path / "out")[name] for name in before
    }
    assert not list((tmp_path / "out" / "wikitext-2").glob(".*"))


def test_a_limit_of_the_system_while_writing(tmp_path: Path) -> None:
    """The real thing: writes beyond a size fail in the middle of the job."""
    program = """
        import resource, signal, sys
        from pathlib import Path
        from mgk.data import DataError, prepare
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            prepare("synthetic-image", out=Path(sys.argv[1]))
        except DataError as error:
            print(error)
    """
    assert resource.RLIMIT_FSIZE is not None
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bin': File too large" in result.stdout
    assert list((tmp_path / "synthetic-image").iterdir()) == []


INTERRUPTED = """
    import sys, time
    from pathlib import Path
    import mgk.data.writer as writer
    from mgk.data import prepare
    stage, out, source = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

    def stop(*arguments, **options):
        print("now", flush=True)
        time.sleep(60)

    if stage == "arrays":
        writer.SetWriter.add_file = stop
    elif stage == "placed":
        writer.write_hashed = stop
    else:
        writer.shutil.rmtree = stop
    prepare("wikitext-2", source, out=out)
"""


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize("stage", ["arrays", "placed", "published"])
def test_killed_at_any_moment_it_leaves_the_old_or_the_new_set(
    tmp_path: Path, stage: str, with_old: bool
) -> None:
    source, out = write_wikitext(tmp_path), tmp_path / "out"
    old = []
    if with_old:
        prepare("wikitext-2", source, out=out)
        old = load_tokens("wikitext-2", "test", folder=out).tolist()
        (source / "wiki.test.tokens").write_bytes(b"the cat sat on the mat \n")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), stage, str(out), str(source)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    manifest = read_manifest(out / "wikitext-2")
    if stage == "published":
        assert manifest is not None
        assert load_tokens("wikitext-2", "test", folder=out).tolist() != old
    elif with_old:
        assert load_tokens("wikitext-2", "test", folder=out).tolist() == old
    else:
        assert manifest is None
    if manifest is not None:
        assert verify(out / "wikitext-2", manifest) == []
    prepare("wikitext-2", source, out=out)
    assert verify(out / "wikitext-2", read_manifest(out / "wikitext-2")) == []


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / "synthetic-text"
    for name, folder_age, file_age in (
        (".unfinished-old", 4000, 4000),
        (".unfinished-new", 10, 10),
        (".unfinished-for-long", 90_000, 10),  # at work for a day, and still writing
        ("0123456789abcdef", 4000, 4000),
        ("mine", 90_000, 90_000),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "tokens").touch()
        os.utime(folder / name / "tokens", (time.time() - file_age,) * 2)
        os.utime(folder / name, (time.time() - folder_age,) * 2)
    prepare("synthetic-text", out=tmp_path)
    left = sorted(path.name for path in folder.iterdir())
    assert [n for n in left if len(n) != 16] == [
        ".unfinished-for-long",
        ".unfinished-new",
        "manifest.json",
        "mine",
    ]
    assert "0123456789abcdef" not in left


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["train", "test"]), st.binary(min_size=1, max_size=9), st.integers(0, 255)),
        min_size=1,
        max_size=30,
    ),
    sequences=st.sampled_from([1, 2]),
    at_once=st.integers(1, 5),
)
def test_what_is_written_is_read(tmp_path_factory, rows, sequences: int, at_once: int) -> None:
    folder = tmp_path_factory.mktemp("set")
    examples = [Example(split, (data, data[::-1] + b"x")[:sequences], label) for split, data, label in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mgk.data.writer._ROWS_AT_ONCE", at_once)
        with writing(folder, "text", {}, synthetic=False) as writer:
            writer.facts.update(BYTES)
            writer.append_examples(examples)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert verify(folder, manifest) == []
    for split in {row[0] for row in rows}:
        data = SequenceDataset(Split(folder, manifest, split), max_length=100, sequences=sequences)
        expected = [example for example in examples if example.split == split]
        assert len(data) == len(expected)
        for place, example in enumerate(expected):
            names = ["input_ids", "input_ids_2"][:sequences]
            assert [bytes(i - 1 for i in data[place][name].tolist()) for name in names] == list(
                example.sequences
            )
            assert int(data[place]["labels"]) == example.label


def test_two_processes_at_once(tmp_path: Path) -> None:
    """As the ranks of torchrun, which all find no sample and make it."""
    make = "prepare('synthetic-text', out=sys.argv[1])"
    program = f"import sys; from mgk.data import prepare; print({make}.manifest.build)"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(outputs) == 1
    folder = tmp_path / "synthetic-text"
    assert verify(folder, read_manifest(folder)) == []
    assert len(list(folder.iterdir())) == 2
