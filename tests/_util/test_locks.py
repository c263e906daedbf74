"""The lock of a folder: held by one process, named to others, gone with its process."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mgk._util.errors import UserError
from mgk._util.files import folder_lock

HOLD = r"""
import os, sys, time
from pathlib import Path
from mgk._util.files import folder_lock
with folder_lock(Path(sys.argv[1])):
    if sys.argv[2] == "fork" and os.fork() == 0:
        os.write(1, b"child\n")  # print() would write the line and its end apart where Python's output is unbuffered
        time.sleep(60)
    os.write(1, b"held\n")
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_it_names_its_holder_and_dies_with_it(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        wanted_lines = ["held\n"] if kind == "alone" else ["child\n", "held\n"]
        # A child that has written its line has let go of the lock.
        assert sorted(process.stdout.readline() for _ in wanted_lines) == wanted_lines
        wanted = (
            f"process {process.pid} on {socket.gethostname()} is at work in this folder: wait until it ends"
        )
        with pytest.raises(UserError, match=wanted), folder_lock(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with folder_lock(tmp_path):  # though a forked process may live
            pass
        if kind == "fork":
            os.killpg(process.pid, signal.SIGKILL)


def test_a_second_holder_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path),
        pytest.raises(UserError, match=f"process {os.getpid()} on "),
        folder_lock(tmp_path),
    ):
        pass
    with folder_lock(tmp_path):
        pass
