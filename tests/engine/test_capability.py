"""Placement by capability: what the NPU cannot compile goes to the CPU, says so once, and is refused where one asks."""

import re

import pytest
from fixture_checkpoints import checkpoint

from chunkrt.backends.qnn import support
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.capability import check_plan, plan_by_capability, told
from chunkrt.engine.options import EngineOptions
from chunkrt.engine.roles import check_runs
from chunkrt.errors import PartitionError
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import find_scheme


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """The NPU's table, whether or not its library is here."""
    monkeypatch.setattr(
        "chunkrt.engine.roles.asked_npu", lambda options: support.npu_support if options.npu == "qnn" else None
    )


def planned(name, placement=None):
    return plan_checkpoint(checkpoint(name), placement or {}).plan


def moved_from(plan, scheme, placement=None, **options):
    return plan_by_capability(plan, find_scheme(scheme), EngineOptions(npu="qnn", **options), placement or {})


def test_linears_that_the_npu_lacks_go_to_the_cpu():
    """LFM2's fixture has feed-forwards of 48 values, which blocks of 32 do not divide.

    Before, the whole model was refused: `check_runs` of the plan as it is says so still.
    """
    plan, scheme = planned("lfm2"), find_scheme("w4a16")
    with pytest.raises(
        PartitionError, match=r"qnn cannot run subgraph static\.\d .*down_proj.* of depth 48: 4-bit weights"
    ):
        check_runs(plan, scheme, EngineOptions(npu="qnn"))
    found, moved = moved_from(plan, "w4a16")
    downs = [node.name for s in plan.subgraphs for node in s.nodes if "down_proj" in node.name and node.op == "MatMul"]
    assert [(each.operator, each.node) for each in moved] == [("linear", name) for name in downs]
    devices = {node.name: s.device for s in found.subgraphs for node in s.nodes}
    before = {node.name: s.device for s in plan.subgraphs for node in s.nodes}
    assert {name for name, device in devices.items() if device != before[name]} == set(downs)
    assert {devices[name] for name in downs} == {"cpu"}
    check_runs(found, scheme, EngineOptions(npu="qnn"))
    check_plan(plan, scheme, EngineOptions(npu="qnn"))
    assert Plan.from_json(found.to_json()) == found


def test_the_line_says_which_how_many_and_why():
    _, moved = moved_from(planned("lfm2"), "w4a16")
    line = told(moved)
    assert line.startswith(
        f"the CPU runs operators that the NPU does not support: {len(moved)} linear "
        f"(first {moved[0].node}: MatMul of u16 by s4"
    )
    assert line.endswith("; --npu-strict makes this an error")
    assert "\n" not in line


def test_operators_that_the_npu_lacks_go_to_the_cpu(monkeypatch):
    plan = planned("llama_mha")
    monkeypatch.setattr(support, "OPERATORS", tuple(op for op in support.OPERATORS if op != "Sigmoid"))
    found, moved = moved_from(plan, "w8a16")
    assert {each.operator for each in moved} == {"silu_mul"}
    assert len(moved) == 2
    on_cpu = {
        node.op for s in found.subgraphs if s.device == "cpu" and s.is_static and s.rows == "T" for node in s.nodes
    }
    assert {"Sigmoid", "Mul"} <= on_cpu
    check_runs(found, find_scheme("w8a16"), EngineOptions(npu="qnn"))


@pytest.mark.parametrize("options", [{"npu_strict": True}, {}])
def test_what_stays_as_it_is(options):
    """Strictly, everything; else what the NPU takes."""
    for name, scheme in [("lfm2", "w4a16")] if options else [("lfm2", "w8a16"), ("gemma3_scaled", "w8a16")]:
        plan = planned(name)
        found, moved = moved_from(plan, scheme, **options)
        assert found is plan
        assert moved == []
    if options:
        with pytest.raises(PartitionError, match=r"down_proj.* of depth 48"):
            check_plan(plan, find_scheme("w4a16"), EngineOptions(npu="qnn", **options))


def test_without_an_npu_nothing_moves():
    plan = planned("lfm2")
    found, _ = plan_by_capability(plan, find_scheme("w4a16"), EngineOptions(npu="native"), {})
    assert found is plan


def test_a_scheme_that_the_npu_lacks_is_refused():
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
def test_what_is_placed_on_the_npu_by_name_is_refused_by_name(name, scheme, placement, node):
    with pytest.raises(
        PartitionError, match="^qnn cannot run node " + re.escape(node) + r"\S*, which is placed on the NPU: "
    ):
        moved_from(planned(name, placement), scheme, placement)


def test_strictly_an_npu_that_is_there_unasked_is_refused_too(monkeypatch):
    """Without, the part that it cannot compile goes to the CPU."""
    monkeypatch.setattr("chunkrt.engine.roles.asked_npu", lambda options: support.npu_support)
    plan, scheme = planned("lfm2"), find_scheme("w4a16")
    check_plan(plan, scheme, EngineOptions(npu="auto"))
    with pytest.raises(PartitionError, match="down_proj"):
        check_plan(plan, scheme, EngineOptions(npu="auto", npu_strict=True))
