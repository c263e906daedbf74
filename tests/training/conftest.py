import pytest


@pytest.fixture(autouse=True, scope="session")
def _data_folder(tmp_path_factory):
    """Synthetic samples are generated once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGK_DATA", str(tmp_path_factory.mktemp("data")))
        yield
