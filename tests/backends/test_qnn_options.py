"""Settings of the NPU: validation, names in the installed provider, and their effect on contexts."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from chunkrt.backends.qnn import HtpOptions, QnnBackend, find_soc, is_installed
from chunkrt.backends.qnn.htp_options import NOT_FOUND, PROVIDER_NAMES, SET_BY_CHUNKRT
from chunkrt.backends.qnn.library import provider_option_names
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import SCHEMES
from chunkrt.testing.random_decoders import random_decoder

needs_qnn = pytest.mark.skipif(not is_installed(), reason="onnxruntime-qnn is not installed")
ROWS = 32


def test_settings_are_converted_to_the_providers_names(tmp_path):
    profile = tmp_path / "npu.csv"
    assert HtpOptions.parse([]) == HtpOptions()
    assert HtpOptions().as_provider_options() == {"htp_performance_mode": "burst"}
    parsed = HtpOptions.parse(["performance_mode=balanced", "vtcm_mb=4", "rpc_control_latency_us=100"])
    assert parsed == HtpOptions(performance_mode="balanced", vtcm_mb=4, rpc_control_latency_us=100)
    expected = {"htp_performance_mode": "balanced", "vtcm_mb": "4", "rpc_control_latency": "100"}
    assert parsed.as_provider_options() == expected
    named = {
        "graph_optimization": "3",
        "context_priority": "high",
        "profiling_level": "basic",
        "profiling_file": str(profile),
    }
    parsed = HtpOptions.parse([f"{name}={value}" for name, value in named.items()])
    expected = {PROVIDER_NAMES[name]: value for name, value in named.items()}
    assert parsed.as_provider_options() == {"htp_performance_mode": "burst", **expected}
    compiling = parsed.as_provider_options(compiling=True)
    assert compiling.keys() == {"htp_performance_mode", PROVIDER_NAMES["graph_optimization"], "qnn_context_priority"}
    assert HtpOptions.parse([f"{name}={value}" for name, value in expected.items()]) == parsed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["vtcm_mb"], "'vtcm_mb' is not a NAME=VALUE setting of the NPU; names: performance_mode, vtcm_mb"),
        ([""], "'' is not a NAME=VALUE setting"),
        (["vtcm=4"], "unknown NPU setting 'vtcm'; did you mean 'vtcm_mb'?"),
        (["vtcm_mb="], "vtcm_mb is '', expected a whole number"),
        (["vtcm_mb=4.5"], "vtcm_mb is '4.5', expected a whole number"),
        (["vtcm_mb=-4"], "vtcm_mb is '-4', expected a whole number"),
        (["vtcm_mb=0"], "vtcm_mb is 0, expected at least 1"),
        (["performance_mode=fast"], "unknown performance mode 'fast'"),
        (["performance_mode=burts"], "did you mean 'burst'?"),
        (["graph_optimization=4"], "graph_optimization is 4, expected 0 to 3"),
        (["graph_optimization=hard"], "graph_optimization is 'hard', expected a whole number"),
        (["context_priority=hihg"], "unknown context priority 'hihg'; did you mean 'high'?"),
        (["profiling_level=all", "profiling_file=x.csv"], "unknown profiling level 'all'"),
        (["profiling_level=basic"], "profiling_level and profiling_file need each other"),
        (["profiling_file=x.csv"], "profiling_level and profiling_file need each other"),
        (["profiling_level=off", "profiling_file=x.csv"], "profiling_level and profiling_file need each other"),
        (["profiling_level=basic", "profiling_file=/no/such/x.csv"], "whose folder does not exist"),
        (["soc_model=57"], "chunkrt sets soc_model itself: name the SoC with `soc`"),
        (["ep.share_ep_contexts=1"], "chunkrt sets ep.share_ep_contexts itself: a context holds one subgraph"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as raised:
        HtpOptions.parse(settings)
    assert message in str(raised.value)


@needs_qnn
def test_installed_provider_knows_our_options():
    names = provider_option_names()
    assert {*PROVIDER_NAMES.values()} - {*NOT_FOUND} <= {*names}
    assert {name for name in SET_BY_CHUNKRT if not name.startswith("ep.") and name != "soc_model"} <= {*names}
    assert all(name.isidentifier() and len(name) < 50 for name in names)


@needs_qnn
def test_provider_options_use_their_own_names():
    parsed = HtpOptions.parse(["htp_share_resource_optimization=1"])
    assert parsed.more == (("htp_share_resource_optimization", "1"),)
    assert parsed.as_provider_options()["htp_share_resource_optimization"] == "1"
    with pytest.raises(
        ConfigError, match="unknown NPU setting 'enable_htp_fp16_precison'; did you mean 'enable_htp_fp16_pr"
    ):
        HtpOptions.parse(["enable_htp_fp16_precison=1"])


@needs_qnn
def test_unknown_provider_option_is_refused_at_open(tmp_path):
    options = HtpOptions(more=(("profiling_levels", "basic"),))
    with pytest.raises(ConfigError, match=r"unknown option of onnxruntime-qnn [\d.]+ 'profiling_levels'; did you mean"):
        QnnBackend(find_soc("SM8650"), contexts=tmp_path, options=options)


@needs_qnn
def test_profiling_and_context_names(tmp_path):
    scheme = SCHEMES["w8a16"]
    decoder = random_decoder([scheme])
    subgraph, plan, weights = decoder.plan.static_subgraphs[0], decoder.plan, decoder.weights["w8a16"]
    what = subgraph, plan, ROWS, scheme, weights

    def backend(**settings):
        return QnnBackend(find_soc("SM8650"), contexts=tmp_path, options=HtpOptions(**settings))

    profile = tmp_path / "npu.csv"
    plain, profiled = backend(), backend(profiling_level="detailed", profiling_file=str(profile))
    plain.prepare(*what)
    key = plain.key(*what)
    assert profiled.key(*what) == backend(context_priority="high").key(*what) == key
    assert backend(graph_optimization=3).key(*what) != key
    assert backend(more=(("htp_share_resource_optimization", "1"),)).key(*what) != key

    executable = profiled.compile(*what)
    assert profiled.num_compiled == 0
    inputs, outputs = (
        {name: np.ones((ROWS, int(plan.tensors[name].shape[1])), np.float32) for name in names}
        for names in (subgraph.inputs, subgraph.outputs)
    )
    executable.run(inputs, outputs)
    with profile.open(newline="") as file:
        events = [row["Event Identifier"] for row in csv.DictReader(file)]
    assert any("(execute) time" in event for event in events)
    assert any(event.startswith(f"{subgraph.inputs[0]}.float16") for event in events)  # the conversion in the graph
