import os

import pytest
import torch
from hypothesis import settings

# The same examples every time: a test fails for what has changed, not for its luck.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    """Workers of pytest-xdist share the cores instead of fighting for them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
