"""Checkpoints: complete or absent, verified by their manifest; the newest valid one is chosen."""

import json

import pytest

from mgk._util.files import atomic_folder, write_hashed
from mgk.training import checkpoints


def make(run, step, content=b"weights"):
    target = run / "checkpoints" / f"step-{step}"
    with atomic_folder(target) as written:
        (written / "model.safetensors").write_bytes(content)
        (written / "optimizer.safetensors").write_bytes(content * 2)
        checkpoints.finalize(written)
    assert not written.exists()
    return target


def test_the_newest_valid_one_is_chosen(tmp_path):
    assert checkpoints.newest_valid(tmp_path) == (None, {})
    make(tmp_path, 9)
    newest = make(tmp_path, 10)
    assert checkpoints.newest_valid(tmp_path) == (newest, {})
    assert checkpoints.step_of(newest) == 10


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            lambda path: flip(path / "optimizer.safetensors"),
            "optimizer.safetensors has changed: its SHA-256 differs",
        ),
        (
            lambda path: (path / "optimizer.safetensors").write_bytes(b""),
            "optimizer.safetensors has 0 bytes instead of 14",
        ),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
        (
            lambda path: (path / "manifest.json").write_text(json.dumps({"files": {"x": 1}})),
            "it has no checksum",
        ),
        (lambda path: flip(path / "manifest.json"), "manifest.json cannot be read"),
        (
            lambda path: write_hashed(path / "manifest.json", {"format": 2, "files": {"x": 1}}),
            "it does not list its files",
        ),
        (
            lambda path: write_hashed(path / "manifest.json", {"format": 1, "files": {}}),
            "is of format 1, not 2",
        ),
    ],
)
def test_corruption_is_found_and_the_one_before_is_taken(tmp_path, spoil, what):
    good, bad = make(tmp_path, 4), make(tmp_path, 8)
    spoil(bad)
    found, corrupt = checkpoints.newest_valid(tmp_path)
    assert found == good
    assert what in corrupt[bad]


def test_a_step_that_is_written_again_replaces_the_old_one(tmp_path):
    make(tmp_path, 4)
    path = make(tmp_path, 4, b"new")
    assert (path / "model.safetensors").read_bytes() == b"new"
    assert checkpoints.verify(path) is None


def test_only_the_newest_are_kept_and_half_deleted_ones_are_not_trusted(tmp_path):
    for step in (2, 4, 10):
        make(tmp_path, step)
    checkpoints.keep_newest(tmp_path, 2)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["step-10", "step-4"]
    assert checkpoints.list_checkpoints(tmp_path / "none") == []
