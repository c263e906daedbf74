import subprocess
from datetime import datetime
from pathlib import Path

import torch

import mgk
from mgk._util import machine
from mgk._util.files import commit_of


def test_description_names_what_ran() -> None:
    here = machine.describe()
    assert here.processor
    assert here.threads == torch.get_num_threads()
    assert here.torch == torch.__version__
    assert here.mgk == mgk.__version__
    assert here.accelerator is None
    moment = datetime.fromisoformat(here.date)
    offset = moment.utcoffset()
    assert offset is not None
    assert not offset
    assert here.processor in str(here)


def test_commit_is_that_of_the_repository_which_tracks_the_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@example.org",
            *arguments,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    tracked, stranger = tmp_path / "tracked.py", tmp_path / "stranger.py"
    tracked.touch()
    stranger.touch()
    assert commit_of(tracked) is None
    git("init", "--quiet")
    git("add", "tracked.py")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert commit_of(tracked) == commit
    assert commit_of(stranger) is None
    tracked.write_text("changed")
    assert commit_of(tracked) == f"{commit}-dirty"
