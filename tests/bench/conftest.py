import pytest
from bench_modules import BENCH


@pytest.fixture(scope="module", autouse=True)
def bench_on_path():
    """bench/ is no package, and what stands in it finds `peers` beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield
