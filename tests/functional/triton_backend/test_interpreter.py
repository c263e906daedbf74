"""The tests in ``interpreted`` pass in a process whose kernels Triton interprets, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton",
    minversion="3.7",
    reason="the Triton backend is tested where triton 3.7 or later is installed: pip install 'mgk[triton]'",
)

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
