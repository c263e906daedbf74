import pytest

from support.chromium import BROWSER, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A tab of a real browser, shared by all tests of this process."""
    if BROWSER is None:
        pytest.skip("there is no Chromium on the PATH")
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
