import json
from pathlib import Path

import pytest

from mgk._util.files import write_json


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
