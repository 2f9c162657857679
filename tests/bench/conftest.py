import pytest
from bench_modules import BENCH


@pytest.fixture(scope="module", autouse=True)
def bench_on_path():
    """bench/ is not a package, and its modules import `peers` from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield
