"""Adapters on several ranks: each rank has its share of an adapter's products."""

from pathlib import Path

import numpy as np
import pytest
from fixture_checkpoints import input_ids
from gates import at_once
from led_ranks import led

from chunkrt.errors import ConfigError, ModelError

FOLDER = Path(__file__).parents[1] / "data" / "adapters"
BIASED, PHI3 = FOLDER / "llama_biased", FOLDER / "phi3_window_120"


def logits_of(engine, ids, adapter=None):
    with engine.session(adapter=adapter) as session:
        return session.prefill(ids, logits="all").logits


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("model", "adapter"), [("llama_biased", BIASED), ("llama_biased_gguf", BIASED), ("phi3_window_120", PHI3)]
)
def test_logits_on_ranks_are_those_of_peft(model, adapter, size):
    ids, expected = input_ids(model), np.load(adapter / "expected.npz")["logits"]
    with led(model, size, adapters=True, npu="reference", scheme="float", cache_dtype="float32") as ranks:
        name = ranks.engine.load_adapter(adapter)
        found = logits_of(ranks.engine, ids, name)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_adapters_at_run_time_are_refused_on_ranks_under_a_static_scheme():
    with (
        pytest.raises(ConfigError, match="under the static scheme 'w8a16' several ranks take no adapters at run time"),
        led("llama_biased", 2, adapters=True, scheme="w8a16"),
    ):
        pass


def test_sessions_on_ranks_choose_adapters_in_shared_chunks():
    ids = input_ids("llama_biased_gguf")
    with led("llama_biased_gguf", 2, adapters=True, chunk_length=8) as ranks:
        engine = ranks.engine
        names = [None, engine.load_adapter(BIASED, name="a"), engine.load_adapter(BIASED, name="b", scale=-1)]
        expected = [logits_of(engine, ids, name) for name in names]
        assert len({logits.tobytes() for logits in expected}) == len(names)
        found = at_once(*(lambda name=name: logits_of(engine, ids, name) for name in names))
        np.testing.assert_array_equal(found, expected)
        with engine.session(adapter="a") as session:
            session.prefill(ids[:9])
            engine.unload_adapter("a")
            engine.load_adapter(BIASED, name="a", scale=3)
            with session.fork() as copy:
                np.testing.assert_array_equal(copy.prefill(ids[9:12]).logits, expected[1][11])
            np.testing.assert_array_equal(session.prefill(ids[9:12]).logits, expected[1][11])


def test_adapter_that_another_rank_cannot_load_is_refused(monkeypatch):
    with led("llama_biased_gguf", 2, adapters=True) as ranks:
        engine, follower = ranks.engine, ranks.of_followers[1]
        own = follower.adapters.read

        def without_the_file(path, name, scale):
            return own(path / "absent", name, scale)

        def of_another_scale(path, name, scale):
            return own(path, name, 2 * scale)

        for read, message in ((without_the_file, "^rank 1: .*absent"), (of_another_scale, "^rank 1: .*differs from")):
            monkeypatch.setattr(follower.adapters, "read", read)
            with pytest.raises(ModelError, match=message):
                engine.load_adapter(BIASED, name="a")
            with pytest.raises(ConfigError, match="no adapter is loaded"):
                engine.session(adapter="a")
        monkeypatch.setattr(follower.adapters, "read", own)
        engine.load_adapter(BIASED, name="a")
        assert logits_of(engine, [1, 2], "a").shape[0] == 2
