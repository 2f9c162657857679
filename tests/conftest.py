"""What all tests share: a cache of their own, never the user's."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """CHUNKRT_HOME for the whole run, so that each checkpoint is compiled once a scheme and not once a test."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNKRT_HOME", str(folder))
        patch.delenv("CHUNKRT_MODELS", raising=False)
        yield folder
