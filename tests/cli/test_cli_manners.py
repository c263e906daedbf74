"""Closed pipes, signals at awkward moments, folders that hold nothing, arguments that cannot be meant."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MGK = (sys.executable, "-m", "mgk")
ENDLESS = [*MGK, *["compare", "listops", "--preset", "smoke", "--steps", "100000", "--out"]]
pytestmark = pytest.mark.usefixtures("own_data_folder")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*MGK, *(item if isinstance(item, bytes) else str(item) for item in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", ["reproduce --list", "data list", "--help"])
def test_a_reader_that_has_enough_ends_it_silently(arguments):
    line = f"'{sys.executable}' -m mgk {arguments} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (141, "", "")


def test_a_folder_that_is_no_run_is_a_usage_error_of_every_verb(tmp_path):
    for verb in (["eval"], ["generate"], ["analyze", "maps"], ["analyze", "ranks"]):
        result = run(*verb, tmp_path)
        assert result.returncode == 2, result.stderr
        assert "there is no run here (recipe.yaml is missing)" in result.stderr


def test_a_report_of_nothing_is_refused(tmp_path):
    result = run("report", "--results", tmp_path, "--out", tmp_path / "page.html")
    assert result.returncode == 2
    assert "there are no results here" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("train", "listops", "--preset", "smoke", "--out", b"run-\xff"), "'run-\\udcff' is not UTF-8 text"),
        (("train", "listops", "--preset", "smoke", "--threads", "99999999"), "less than or equal to 1024"),
        (("train", "listops", "--preset", "smoke", "--lr", "inf"), "should be a finite number, got inf"),
        (("train", "listops", "--preset", "smoke", "--heads", "1000000000"), "GB, and this machine has"),
        (("bench", "attention", "--threads", "99999999", "--length", "8"), "threads must be from 1 to 1024"),
        (("compare", "listops", "--preset", "smoke", "--candidates", "mgk:1,mgk:01"), "each once"),
    ],
    ids=["bytes", "threads", "lr", "heads", "bench", "twice"],
)
def test_what_cannot_be_meant_is_one_sentence(tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.returncode == 2, result.stderr
    assert reason in result.stderr
    assert "this is a bug" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_a_signal_to_the_parent_alone_ends_a_comparison(tmp_path, number, code, seconds):
    command = [*ENDLESS, str(tmp_path / "out")]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, start_new_session=True)
        time.sleep(seconds)
        process.send_signal(number)
        try:
            assert process.wait(timeout=100) == code
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "errors").read_text()
    assert "Traceback" not in text
    assert Path(tmp_path / "out" / "comparison.json").exists() is False


def test_orphans_end_silently(tmp_path):
    command = [*ENDLESS, str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    while not list((tmp_path / "out").rglob("metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    _, errors = process.communicate(timeout=60)  # returns when the last process has closed its end
    assert b"Traceback" not in errors
