import os
from pathlib import Path

# oneDNN takes AMX where the processor has it and dies of SIGILL where a virtual machine does not grant it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

# The same examples every time: a test fails for what has changed, not by chance.
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


@pytest.fixture(scope="module")
def own_data_folder(tmp_path_factory):
    """Data are prepared in a folder of the module's tests, by one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGK_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def committed():
    """The committed results."""
    from mgk.experiments.artifacts import gather
    from mgk.experiments.result_store import ResultStore

    store = ResultStore(Path(__file__).parents[1] / "results")
    return gather(store, next(iter(store.presets), "laptop"))
