"""Signals as exit codes, at awkward moments too."""

import pickle
import signal
import subprocess
import sys

import pytest

from mgk._util.errors import Interrupted

PROGRAM = """
import sys, time
from mgk._util.signals import raise_on_signals
first = raise_on_signals()
kind = sys.argv[1]
if kind == "import":
    sys.path.insert(0, sys.argv[2])
    import slow
try:
    print("now", flush=True)
    time.sleep(60)
except KeyboardInterrupt as stop:
    sys.exit(128 + stop.number if first() == stop.number else 1)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("kind", ["work", "import"])
def test_exit_codes_are_those_of_shells(tmp_path, number, code, kind):
    slow = "try:\n    import time\n    print('now', flush=True)\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
    (tmp_path / "slow.py").write_text(slow)
    command = [sys.executable, "-c", PROGRAM, kind, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "now\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert errors == (f"mgk: stopped by {number.name}\n" if kind == "import" else "")


def test_an_interruption_comes_back_from_another_process():
    error = pickle.loads(pickle.dumps(Interrupted("stopped", signal.SIGTERM)))
    assert (str(error), error.number, error.exit_code) == ("stopped", signal.SIGTERM, 143)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_package_loads_is_no_traceback(number, code):
    # As the console script begins, with a signal at the package's first import.
    program = f"""
import os, sys
def at_import(event, arguments):
    if event == "import" and arguments[0] == "mgk._util.lazy":
        os.kill(os.getpid(), {int(number)})
sys.addaudithook(at_import)
from mgk_command import main
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert ended.stderr == f"mgk: stopped by {number.name}\n"
