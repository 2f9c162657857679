"""Tests of `chunkrt ops`, and of --ops in commands that run a model."""

import json

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

from chunkrt.backends.dispatch import registered_operators
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.quant.scheme import SCHEMES, Recipe

GGUF = checkpoint("llama_biased_gguf")


LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def ops(command, *arguments):
    finished = command("ops", GGUF, "--json", *arguments)
    assert (finished.status, finished.err) == (0, "")
    return json.loads(finished.out)


def by_name(found):
    return {(row["operator"], row["role"]): row for row in found["operators"]}


def test_ops_lists_uses_and_origin_of_operators(command):
    found = ops(command)
    rows = by_name(found)
    assert (found["scheme"], found["cpu"], found["npu"]) == ("w8a8-dynamic", "native", "native")
    assert {key: row["uses"] for key, row in rows.items()} == {
        ("add", "npu"): 12,
        ("cached_attention", "cpu"): 2,
        ("embedding", "cpu"): 1,
        ("gather_rows", "cpu"): 1,
        ("linear", "npu"): 8,
        ("logits", "cpu"): 1,
        ("quantize", "cpu"): 1,
        ("quantize", "npu"): 8,
        ("rms_norm", "npu"): 5,
        ("rope", "cpu"): 2,
        ("sampler", "session"): 1,
        ("silu_mul", "npu"): 2,
    }
    assert rows["linear", "npu"] == {
        "operator": "linear",
        "role": "npu",
        "form": "native",
        "origin": "chunkrt.backends.native.operators",
        "reason": "native form",
        "uses": 8,
        "nodes": [f"model.layers.{layer}.{module}.product" for layer in range(2) for module in LINEARS],
    }
    assert rows["rope", "cpu"]["reason"] == "a part of cached_attention"
    assert rows["sampler", "session"]["origin"] == "chunkrt.engine.sampling"


def test_ops_table_equals_json(command):
    rows = ops(command, "--ops", "none,+linear", "--ops", "-rope")["operators"]
    finished = command("ops", GGUF, "--ops", "none,+linear", "--ops", "-rope")
    header, *lines = finished.out.splitlines()
    assert header.split() == ["operator", "uses", "role", "form", "from", "why"]
    keys = ("operator", "uses", "role", "form", "origin")
    assert [line.split(maxsplit=5) for line in lines] == [
        [*(str(row[key]) for key in keys), row["reason"]] for row in rows
    ]
    places = {(row["operator"], row["role"]): (row["form"], row["reason"]) for row in rows}
    assert places["linear", "npu"] == ("native", "native form")
    assert places["quantize", "npu"] == ("native", "a part of linear")
    assert places["rope", "cpu"] == ("reference", "switched off by --ops=-rope")
    assert places["add", "npu"] == ("reference", "switched off by --ops none")


def test_ops_does_not_open_the_npu(command):
    rows = by_name(ops(command, "--npu", "qnn", "--ops=-silu_mul"))
    assert rows["linear", "npu"]["form"] == "qnn"
    assert rows["logits", "cpu"]["form"] == "native"
    assert rows["silu_mul", "npu"]["form"] == "reference"
    assert ("quantize", "npu") not in rows  # its grids are static


def test_ops_names_the_distribution_of_a_plugin(command, monkeypatch):
    registry = registered_operators().copy()
    with registry.from_distribution("acme-ops"):
        registry.register("rms_norm", "toy")(lambda *inputs: inputs[0])
    monkeypatch.setattr("chunkrt.cli.ops.registered_operators", lambda: registry)
    row = by_name(ops(command))["rms_norm", "npu"]
    assert (row["form"], row["reason"]) == ("toy", "form of plug-in acme-ops")
    assert row["origin"] == f"acme-ops ({__name__})"


def test_ops_defaults_to_none_for_npu_reference(command):
    rows = by_name(ops(command, "--npu", "reference"))
    assert rows["linear", "npu"]["reason"] == "off by default with --npu reference"
    assert by_name(ops(command, "--npu", "reference", "--ops", "all"))["linear", "npu"]["reason"] == "native form"


def test_ops_lists_nodes_with_refusals(command, monkeypatch):
    registry = registered_operators().copy()
    with registry.from_distribution("acme-ops"):
        refuses = lambda node: "" if node.name.startswith("model.layers.1.") else "it is in another layer"  # noqa: E731
        registry.register("rms_norm", "fast", refuses=refuses)(lambda *inputs: inputs[0])
        registry.register("rms_norm", "exact", refuses=lambda node: "not yet")(lambda *inputs: inputs[0])
    monkeypatch.setattr("chunkrt.cli.ops.registered_operators", lambda: registry)
    finished = command("ops", GGUF, "--nodes", "--ops=-model.layers.0.post_attention_layernorm.rms_norm")
    assert finished.status == 0
    header, *lines = finished.out.splitlines()
    assert header.split() == ["operator", "node", "role", "form", "from", "why"]
    norms = {line.split()[1]: line.split(maxsplit=3)[3] for line in lines if line.startswith("rms_norm ")}
    refused = "fast (acme-ops) refuses it: it is in another layer; exact (acme-ops) refuses it: not yet"
    native = f"native chunkrt.backends.native.operators native form; {refused}"
    off = "reference chunkrt.backends.reference switched off by --ops=-model.layers.0.post_attention_layernorm.rms_norm"
    fast = f"fast acme-ops ({__name__}) form of plug-in acme-ops"
    assert {name: " ".join(why.split()) for name, why in norms.items()} == {
        "model.layers.0.input_layernorm.output": native,
        "model.layers.0.post_attention_layernorm.output": off,
        "model.layers.1.input_layernorm.output": fast,
        "model.layers.1.post_attention_layernorm.output": fast,
        "model.norm.output": native,
    }


def test_ops_lists_nodes_in_the_order_of_the_model(command):
    finished = command("ops", GGUF, "--nodes", "--ops=-model.layers.0.mlp.linear")
    names = [line.split()[1] for line in finished.out.splitlines()[1:]]
    order = [node.name for subgraph in plan_checkpoint(GGUF, {}).plan.subgraphs for node in subgraph.nodes]
    places = [order.index(name) for name in names if name in order]
    assert places == sorted(places)
    assert names[-1] == "session"  # the sampler has no node
    assert len(places) == len(names) - 1 > 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "rms_norm=acme"), "unknown form of rms_norm 'acme'"),
        (("--ops", "layers.1.rms_norm=reference"), "write *.layers.1.rms_norm=reference"),
        (("--ops", "rms_norm=qnn"), "qnn does not run the node, but native does"),
        (("--ops", "all", "--ops", "none"), "'all' and 'none' contradict each other"),
        (("--ops", "+rope,-rope"), "+rope and -rope contradict each other"),
        (("--ops", "rope"), "'rope' is not a switch"),
        (("--ops", "-linears"), "unknown operator 'linears'; did you mean 'linear'?"),
        (("--scheme", "float"), "native cannot run subgraph static.0 under scheme float"),
    ],
)
@pytest.mark.parametrize("what", ["ops", "run"])
def test_ops_errors_print_one_line(command, what, arguments, message):
    finished = command(what, GGUF, *(("-p", "hello") if what == "run" else ()), *arguments)
    expect_one_line(finished, message, 1)
    assert len(finished.err.splitlines()) == 1


def answer(command, model, *arguments):
    finished = command("run", model, "-p", "hello there", "-n", 24, *arguments)
    assert finished.status == 0, finished.err
    return finished.out


def test_ops_all_and_none_give_the_same_answer(command):
    expected = answer(command, GGUF, "--ops", "all")
    assert len(expected) > 5
    for switches in (["none"], ["none,+linear"], ["-rope", "-rms_norm"]):
        assert answer(command, GGUF, *(word for switch in switches for word in ("--ops", switch))) == expected


def test_ops_applies_to_engine_directories_and_settings_files(command, tmp_path):
    expected = answer(command, GGUF)
    folder, settings = tmp_path / "engine", tmp_path / "settings.toml"
    compile_checkpoint(GGUF, Recipe(scheme=SCHEMES["w8a8-dynamic"]), {}, folder, model="toy")
    settings.write_text('ops = ["none", "+linear"]\n')
    assert answer(command, folder, "--ops", "none") == expected
    assert answer(command, folder, "--settings", settings) == expected
    found = json.loads(command("ops", folder, "--json", "--settings", settings).out)
    assert {row["form"] for row in found["operators"] if row["operator"] != "sampler"} == {"native", "reference"}
    found = json.loads(command("ops", folder, "--json", "--settings", settings, "--ops", "all").out)
    assert {row["form"] for row in found["operators"] if row["operator"] != "sampler"} == {"native"}
