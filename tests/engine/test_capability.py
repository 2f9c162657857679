"""Placement by capability: operators that the NPU cannot compile go to the CPU with one warning, or are an error if the
NPU is required."""

import re

import pytest
from fixture_checkpoints import checkpoint

from chunkrt.backends.qnn import htp_support as support
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.capability import check_plan, plan_by_capability, told
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.roles import check_runs
from chunkrt.errors import PartitionError
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import find_scheme


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The NPU's table, with or without its library."""
    monkeypatch.setattr(
        "chunkrt.engine.roles.asked_npu", lambda options: support.npu_support if options.npu == "qnn" else None
    )


def planned(name, placement=None):
    return plan_checkpoint(checkpoint(name), placement or {}).plan


def moved_from(plan, scheme, placement=None, **options):
    return plan_by_capability(plan, find_scheme(scheme), EngineOptions(npu="qnn", **options), placement or {})


def test_unsupported_linears_go_to_the_cpu():
    """LFM2's fixture has feed-forwards of 48 values, which are not a multiple of 32.

    `check_runs` still rejects the unchanged plan.
    """
    plan, scheme = planned("lfm2"), find_scheme("w4a16")
    with pytest.raises(
        PartitionError, match=r"qnn cannot run subgraph static\.\d .*down_proj.* of depth 48: 4-bit weights"
    ):
        check_runs(plan, scheme, EngineOptions(npu="qnn"))
    found, moved = moved_from(plan, "w4a16")
    downs = [node.name for s in plan.subgraphs for node in s.nodes if "down_proj" in node.name and node.op == "MatMul"]
    assert [(operator, node) for operator, node, _ in moved] == [("linear", name) for name in downs]
    devices = {node.name: s.device for s in found.subgraphs for node in s.nodes}
    before = {node.name: s.device for s in plan.subgraphs for node in s.nodes}
    assert {name for name, device in devices.items() if device != before[name]} == set(downs)
    assert {devices[name] for name in downs} == {"cpu"}
    check_runs(found, scheme, EngineOptions(npu="qnn"))
    check_plan(plan, scheme, EngineOptions(npu="qnn"))
    assert Plan.from_json(found.to_json()) == found


def test_warning_names_operators_counts_and_reasons():
    _, moved = moved_from(planned("lfm2"), "w4a16")
    line = told(moved)
    assert line.startswith(
        f"the CPU runs operators that the NPU does not support: {len(moved)} linear "
        f"(first {moved[0][1]}: MatMul of u16 by s4"
    )
    assert line.endswith("; `npu_strict=True` makes this an error")
    assert "\n" not in line


def test_unsupported_operators_go_to_the_cpu(monkeypatch):
    plan = planned("llama_mha")
    monkeypatch.setattr(support, "OPERATORS", tuple(op for op in support.OPERATORS if op != "Sigmoid"))
    found, moved = moved_from(plan, "w8a16")
    assert {operator for operator, *_ in moved} == {"silu_mul"}
    assert len(moved) == 2
    on_cpu = {
        node.op for s in found.subgraphs if s.device == "cpu" and s.is_static and s.rows == "T" for node in s.nodes
    }
    assert {"Sigmoid", "Mul"} <= on_cpu
    check_runs(found, find_scheme("w8a16"), EngineOptions(npu="qnn"))


@pytest.mark.parametrize("options", [{"npu_strict": True}, {}])
def test_plan_is_unchanged_if_supported_or_strict(options):
    """With `npu_strict` everything stays; otherwise the operators that the NPU supports."""
    for name, scheme in [("lfm2", "w4a16")] if options else [("lfm2", "w8a16"), ("gemma3_scaled", "w8a16")]:
        plan = planned(name)
        found, moved = moved_from(plan, scheme, **options)
        assert found is plan
        assert moved == []
    if options:
        with pytest.raises(PartitionError, match=r"down_proj.* of depth 48"):
            check_plan(plan, find_scheme("w4a16"), EngineOptions(npu="qnn", **options))


def test_plan_is_unchanged_without_an_npu():
    plan = planned("lfm2")
    found, _ = plan_by_capability(plan, find_scheme("w4a16"), EngineOptions(npu="native"), {})
    assert found is plan


def test_unsupported_scheme_is_rejected():
    plan = planned("lfm2")
    found, _ = moved_from(plan, "w8a8-dynamic")
    assert found is plan
    with pytest.raises(PartitionError, match="qnn cannot run subgraph"):
        check_plan(plan, find_scheme("w8a8-dynamic"), EngineOptions(npu="qnn"))


@pytest.mark.parametrize(
    ("name", "scheme", "placement", "node"),
    [
        ("qwen3_5", "w8a16", {"model.layers.0.linear_attn": "npu"}, "model.layers.0.linear_attn"),
        ("lfm2", "w4a16", {"model.layers.*": "npu"}, "model.layers.0"),
        ("lfm2", "w4a16", {"": "cpu", "model.layers.2.feed_forward.down_proj": "npu"}, "model.layers.2.feed_forward"),
    ],
)
def test_unsupported_node_placed_on_the_npu_is_rejected_by_name(name, scheme, placement, node):
    with pytest.raises(
        PartitionError, match="^qnn cannot run node " + re.escape(node) + r"\S*, which is placed on the NPU: "
    ):
        moved_from(planned(name, placement), scheme, placement)


def test_strict_auto_npu_is_rejected_too(monkeypatch):
    """Without `npu_strict`, the part that it cannot compile goes to the CPU."""
    monkeypatch.setattr("chunkrt.engine.roles.asked_npu", lambda options: support.npu_support)
    plan, scheme = planned("lfm2"), find_scheme("w4a16")
    check_plan(plan, scheme, EngineOptions(npu="auto"))
    with pytest.raises(PartitionError, match="down_proj"):
        check_plan(plan, scheme, EngineOptions(npu="auto", npu_strict=True))
