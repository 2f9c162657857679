"""Random interleavings of sessions of real decoders: each session gets the same bits as alone.

`python tests/support/interleavings.py 10000` and `python tests/support/led_ranks.py 1000` try that many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from calibrated import calibrated
from fixture_checkpoints import NAMES, ONE_OF_EACH_STATE, checkpoint, input_ids
from interleavings import LENGTHS, Faults, check_interleaving, load_for_interleavings
from led_ranks import led

from chunkrt.backends.qnn import open_htp
from chunkrt.engine.engine import Engine


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[..., Engine]]:
    """Return a function that loads a tiny checkpoint with a chunk length, once."""
    loaded = []

    @cache
    def load(name: str, chunk_length: int) -> Engine:
        loaded.append(load_for_interleavings(checkpoint(name), chunk_length))
        return loaded[-1]

    yield load
    for engine in loaded:
        engine.close()


@pytest.mark.sampled(name=ONE_OF_EACH_STATE, seed=range(3))
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_random_interleavings_change_no_bit(name: str, seed: int, load: Callable[..., Engine]) -> None:
    engine = load(name, LENGTHS[seed % 3])
    check_interleaving(engine, seed, input_ids(name))
    assert engine.stats().waiting_runs == 0


@pytest.mark.sampled(every=3, name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("name", NAMES)
def test_random_interleavings_with_faults(name: str, load: Callable[..., Engine]) -> None:
    """A failed task fails the sequences of its chunk, whose states are restored; the others continue."""
    faults = Faults(every=7)
    check_interleaving(load(name, 8), 4, input_ids(name), faults=faults)
    assert faults.num > 1


@pytest.mark.sampled(every=3, name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize("name", NAMES)
def test_random_interleavings_with_a_prefix_cache(name: str, load: Callable[..., Engine]) -> None:
    """The cache is too small for all prompts; sessions alone have none."""
    with load_for_interleavings(checkpoint(name), 32, prefix_cache_memory=60_000) as cached:
        for seed in (5, 6):
            check_interleaving(cached, seed, input_ids(name), faults=Faults(every=31), plain=load(name, 32))
        assert cached.stats().cached_tokens


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_window_5"])
def test_random_interleavings_with_bfloat16_attention_to_int8_caches(name: str) -> None:
    with load_for_interleavings(checkpoint(name), 8, attention_math="bfloat16", cache_dtype="int8") as engine:
        check_interleaving(engine, 7, input_ids(name))


@pytest.mark.sampled(every=3, name=ONE_OF_EACH_STATE)
@pytest.mark.parametrize(
    ("name", "size", "slots"), [(name, size, 2 if size == 2 else None) for name in NAMES for size in (2, 4)]
)
def test_random_interleavings_on_ranks(name: str, size: int, slots: int | None) -> None:
    length = LENGTHS[len(name) % 3]
    with led(name, size, chunk_length=length, chunks_in_flight=slots) as ranks:
        faults = Faults(every=29)
        for seed, injected in ((0, None), (1, faults)):
            check_interleaving(ranks.engine, seed, input_ids(name), has_ranks=True, faults=injected)
        assert faults.num > 1
        stats = ranks.engine.stats()
        assert stats.waiting_runs == 0
        assert stats.shared_rows > stats.shared_chunks > 0


ATTENTION = {"attention": "npu"}
CONVOLUTION = {"placement": {"model.layers.*.conv": "npu"}}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mistral_window_5", ATTENTION | {"npu_window": 64}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("llama_mha", {}),
                ("llama_mha", {"decode_on": "npu"}),
                ("llama_gqa", ATTENTION | {"npu_window": 32}),
                ("llama_gqa", ATTENTION | {"npu_window": "32,64", "decode_on": "npu"}),
                ("llama_gqa", ATTENTION | {"npu_window": "32,128"}),  # tokens and prompts have the same executor
                ("mistral_window_5", ATTENTION | {"npu_window": 64, "decode_on": "npu"}),
                ("lfm2", CONVOLUTION),
                ("lfm2", CONVOLUTION | {"decode_on": "npu"}),
                ("lfm2", ATTENTION | {"npu_window": "32,64", "decode_on": "npu"}),
            ]
        ),
    ],
)
def test_random_interleavings_on_an_emulated_npu(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
    if not open_htp().is_emulated:
        pytest.skip("this machine has an NPU, and a compiler for that NPU alone")
    model, path = calibrated(name, tmp_path / "calibration.npz"), tmp_path / "calibration.npz"
    options = {"npu": "qnn", "scheme": "w8a16", "calibration": path, "soc": "SM8650"} | how
    with load_for_interleavings(model, 16, **options) as engine:
        check_interleaving(engine, 0, input_ids(name), most=4, longest=50)
        assert engine.stats().shared_rows > engine.stats().shared_chunks > 0
