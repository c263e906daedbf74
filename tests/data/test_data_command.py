"""``mgk data`` as a user runs it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from official_layouts import pack, write_imdb, write_pairs, write_wikitext


def run(
    *arguments: object, python: tuple[str, ...] = ("-m", "mgk"), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "data", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def failed(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one sentence of a failure."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_list_prepare_inspect_verify(tmp_path: Path) -> None:
    out = {"MGK_DATA": str(tmp_path / "data")}
    source = pack(write_imdb(tmp_path), tmp_path / "aclImdb.tar.gz")

    prepared = run("prepare", "text", "--source", source, **out)
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout == f"{tmp_path / 'data' / 'text'}: train 6, test 6\n"
    assert prepared.stderr.startswith("prepare text: ")
    assert run("prepare", "text", "--source", source, **out).stdout.endswith(
        "train 6, test 6 (nothing to do)\n"
    )

    listed = run("list", **out)
    assert listed.returncode == 0
    (line,) = (line for line in listed.stdout.splitlines() if line.split()[:1] == ["text"])
    assert line.split(maxsplit=1)[1] == "here: train 6, test 6"
    for name in (
        "listops",
        "pathfinder",
        "wikitext-103",
        "fashion-mnist",
        "synthetic-retrieval",
        "CC BY-SA",
        "84 MB",
    ):
        assert name in listed.stdout
    assert str(tmp_path / "data") in listed.stdout

    shown = run("inspect", "text", "--first", "1", **out)
    assert shown.returncode == 0
    for part in (
        "train: 6 examples",
        "classes 0: 3, 1: 3",
        "0: 'train neg review 0 é'",
        "##",
        "vocabulary of 257",
    ):
        assert part in shown.stdout

    (tmp_path / "data" / "mnist").mkdir()
    (tmp_path / "data" / "mnist" / "manifest.json").write_text("{")
    assert "corrupt: see mgk data verify" in run("list", **out).stdout
    verified = run("verify", **out)
    assert (verified.returncode, verified.stdout) == (1, "text: 7 files, all as they were written\n")
    assert "mnist/manifest.json: this is not a manifest" in verified.stderr
    (tmp_path / "data" / "mnist" / "manifest.json").unlink()
    verified = run("verify", **out)
    assert (verified.returncode, verified.stdout) == (0, "text: 7 files, all as they were written\n")
    (path,) = (tmp_path / "data" / "text").glob("*/test.labels.bin")
    path.write_bytes(bytes(6))
    assert "test.labels.bin: this file of the prepared set has changed" in failed(
        run("verify", "text", **out), 1
    )
    again = run("prepare", "text", "--source", source, **out)
    assert again.returncode == 0
    assert "Note: " in again.stderr
    assert "test.labels.bin" in again.stderr


def test_nothing_to_verify(tmp_path: Path) -> None:
    result = run("verify", MGK_DATA=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, f"nothing is prepared in {tmp_path}\n")


def test_many_changed_files_are_not_all_listed(tmp_path: Path) -> None:
    source = write_imdb(tmp_path)
    run("prepare", "text", "--source", source, "--out", tmp_path / "out")
    for number in range(10, 16):
        (source / "train" / "pos" / f"{number}_8.txt").write_text("new")
    notes = run("prepare", "text", "--source", source, "--out", tmp_path / "out").stderr.splitlines()
    assert sum("this source file is new; prepared anew" in note for note in notes) == 3
    assert notes[-1] == "Note: and 3 more of this kind."


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_stopped_in_the_middle(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Nothing half is published, and no worker is left behind."""
    command = [
        sys.executable,
        "-m",
        "mgk",
        "data",
        "prepare",
        "pathfinder",
        "--workers",
        "2",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob("*/*/train.tokens.bin")):
        assert process.poll() is None
        time.sleep(0.05)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as Ctrl-C does
    else:
        process.send_signal(sent)
    _, errors = process.communicate(timeout=60)  # returns when the last worker has closed its end of stderr
    assert process.returncode == code
    assert "Traceback" not in errors
    assert not (tmp_path / "pathfinder" / "manifest.json").exists()
    if sent != signal.SIGKILL:
        assert errors.splitlines()[-1] == "mgk: interrupted; an older prepared set is unchanged"
        assert list((tmp_path / "pathfinder").iterdir()) == []


def test_listops_options_and_official_files(tmp_path: Path) -> None:
    small = (
        "--train",
        30,
        "--validation",
        5,
        "--test",
        5,
        "--min-length",
        5,
        "--max-length",
        50,
        "--workers",
        2,
    )
    result = run("prepare", "listops", *small, "--format", "tsv", "--out", tmp_path / "tsv")
    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "tsv" / "basic_train.tsv").read_text().splitlines()) == 31
    result = run("prepare", "listops", *small, "--out", tmp_path / "sets")
    assert "train 30, validation 5, test 5" in result.stdout
    result = run("prepare", "listops", "--source", tmp_path / "tsv", "--out", tmp_path / "sets")
    assert result.returncode == 0
    assert "prepared with other options" in result.stderr
    shown = run("inspect", "listops", "--folder", tmp_path / "sets").stdout
    assert "[M" in shown or "[SM" in shown


def test_a_sample_is_said_to_be_one(tmp_path: Path) -> None:
    assert run("prepare", "synthetic-listops", "--out", tmp_path).returncode == 0
    assert (
        "a synthetic sample, not the real task"
        in run("inspect", "synthetic-listops", "--folder", tmp_path).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("prepare", "listop"), "did you mean 'listops'?"),
        (("inspect", "imdb"), "there is no task 'imdb': choose one of listops, text"),
        (("verify", "listop"), "did you mean 'listops'?"),
        (("prepare", "text", "--source", "/nowhere/at/all"), "'/nowhere/at/all' does not exist"),
        (("prepare", "text", "--out", "{tmp}"), "fetch aclImdb_v1.tar.gz"),
        (
            ("prepare", "text", "--unit", "word", "--out", "{tmp}"),
            "text has no option 'unit'; it has seed, validation",
        ),
        (("prepare", "listops", "--format", "csv"), "'csv' is not one of arrays, tsv"),
        (
            ("prepare", "listops", "--format", "tsv", "--from-hub"),
            "--from-hub takes neither --source nor --format tsv",
        ),
        (("prepare", "listops", "--format", "tsv"), "--format tsv is for listops, with --out DIR"),
        (("prepare", "listops", "--train", "0"), "greater than or equal to 1"),
        (
            ("prepare", "text", "--source", "{tmp}", "--from-hub"),
            "--from-hub takes neither --source nor --format tsv",
        ),
        (("prepare", "pathfinder", "--from-hub", "--out", "{tmp}"), "pathfinder is not at the hub"),
        (
            ("prepare", "pathfinder", "--difficulty", "harder", "--out", "{tmp}"),
            "one of easy, intermediate, hard",
        ),
    ],
)
def test_bad_usage(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    assert reason in failed(run(*filled, MGK_DATA=str(tmp_path)), 2)


def test_bad_data_is_a_failed_job(tmp_path: Path) -> None:
    source = write_pairs(tmp_path)
    (source / "new_aan_pairs.test.tsv").write_text("1.0\tonly\tthree\n")
    sentence = failed(run("prepare", "retrieval", "--source", source, "--out", tmp_path / "out"), 1)
    assert sentence.startswith("mgk: ")
    assert "new_aan_pairs.test.tsv, line 1: 3 columns instead of 5" in sentence
    (tmp_path / "file").touch()
    wiki = write_wikitext(tmp_path)
    failed(run("prepare", "wikitext-2", "--source", wiki, "--out", tmp_path / "file" / "below"), 1)
    assert "not prepared in" in failed(run("inspect", "image", "--folder", tmp_path), 1)
    assert "not prepared in" in failed(run("verify", "image", "--folder", tmp_path), 1)


@pytest.mark.parametrize("arguments", [("--help",), ("prepare", "--help"), ("prepare", "nothing"), ("list",)])
def test_help_list_and_usage_errors_import_neither_torch_nor_numpy(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments, python=("-X", "importtime", "-m", "mgk"), MGK_DATA=str(tmp_path))
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "mgk.data.task_registry" in imported
    assert not imported & {"torch", "numpy", "transformers", "datasets"}


def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mgk.data import UsageError, data_folder

    monkeypatch.setenv("MGK_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("MGK_DATA")
    assert data_folder().parts[-2:] == ("mgk", "data")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(UsageError, match=r"set MGK_DATA to one, or pip install 'mgk\[data\]'"):
        data_folder()
