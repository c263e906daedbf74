import importlib.util
import os
import re
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The marks of transformers' common tests, where test_transformers_common.py runs them."""
    checkout = os.environ.get("MGK_TRANSFORMERS_CHECKOUT")
    installed = importlib.util.find_spec("transformers")
    if checkout is None or installed is None or installed.origin is None:
        return
    paths = [Path(installed.origin).with_name("testing_utils.py"), *Path(checkout, "tests").glob("**/*.py")]
    marks = {mark for path in paths for mark in re.findall(r"\bmark\.(\w+)", path.read_text("utf-8"))}
    for mark in marks:
        config.addinivalue_line("markers", f"{mark}: of transformers")
