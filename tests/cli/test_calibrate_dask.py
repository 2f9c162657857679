"""`chunkrt calibrate --dask`: a cluster within this process gives the ranges of one machine."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.quant.calibration import Calibration

distributed = pytest.importorskip("distributed", reason='distributed is not installed: pip install "chunkrt[dask]"')

FOLDER = checkpoint("llama_gqa")


@pytest.fixture(scope="module")
def address():
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0") as found:
        yield found.scheduler_address


@pytest.fixture
def ids(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(5).integers(0, 64, 2500))
    return path


@pytest.mark.parametrize("options", [(), ("--scheme", "w8a8", "--outputs", "grid")])
def test_shards_give_the_ranges_of_one_machine(command, address, ids, tmp_path, options):
    here, there = tmp_path / "here.npz", tmp_path / "there.npz"
    given = ("calibrate", FOLDER, "--ids", ids, "--tokens", 2500, *options, "-o")
    assert command(*given, here).status == 0
    finished = command(*given, there, "--dask", address)
    assert (finished.status, finished.err) == (0, "")
    one, merged = Calibration.load(here), Calibration.load(there)
    assert one.token_ids.size == merged.token_ids.size == 2500
    assert one.equalisation == merged.equalisation
    for name, peak in one.peaks.items():
        assert merged.peaks[name] == pytest.approx(peak, rel=1e-5)
    for name, limit in one.limits.items():
        assert merged.limits[name] == pytest.approx(limit, rel=1e-5)
    for name, columns in one.column_peaks.items():
        np.testing.assert_allclose(merged.column_peaks[name], columns, rtol=1e-5)
    with chunkrt.load(FOLDER, npu="reference", calibration=there, scheme=options[1] if options else "w8a16") as engine:
        assert np.isfinite(engine.session().prefill([1, 2, 3]).logits).all()


def test_worker_with_other_weights_is_one_line(command, address, ids, monkeypatch):
    from chunkrt.cli import calibration_shards

    digests = iter(["leader"])
    monkeypatch.setattr(calibration_shards, "weights_digest", lambda source: next(digests, "worker"))
    expect_one_line(command("calibrate", FOLDER, "--ids", ids, "--dask", address), "a worker of the cluster has other")
