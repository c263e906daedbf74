import json
from pathlib import Path

import pytest

from mgk._util.files import file_specs, read_verified, with_hash, write_hashed, write_json, wrong_files


def test_writes_what_json_reads(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, {"a": [1, None]})
    assert json.loads(path.read_text()) == {"a": [1, None]}


def test_a_failure_leaves_the_older_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, 1)
    with pytest.raises(TypeError):
        write_json(path, [2, object()])
    assert json.loads(path.read_text()) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_hashed_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "hashed.json"
    write_hashed(path, {"b": [1.5, None, "é"], "a": {"x": 1}})
    assert read_verified(path) == {"a": {"x": 1}, "b": [1.5, None, "é"]}
    path.write_text(
        json.dumps(json.loads(path.read_text()), sort_keys=True)
    )  # another form of the same content
    assert read_verified(path)["a"] == {"x": 1}
    for text, reason in (
        (json.dumps({**with_hash({"a": 1}), "a": 2}), "its content has changed"),
        ('{"a": 1}', "it has no checksum"),
        ("[1]", "it is not a JSON object"),
        ("[" * 100_000, "it is nested too deeply"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_verified(path)


def test_files_that_are_not_what_was_written_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_bytes(b"content")
    specs = file_specs(tmp_path, paths)
    assert list(wrong_files(tmp_path, specs)) == []
    paths[0].write_bytes(b"contend")
    paths[1].write_bytes(b"")
    paths[2].unlink()
    assert list(wrong_files(tmp_path, specs)) == [
        ("a", "has changed: its SHA-256 differs"),
        ("b", "has 0 bytes instead of 7"),
        ("c", "is missing"),
    ]
