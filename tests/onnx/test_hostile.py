"""Damaged or malicious ONNX files: one line of error each, and no significant memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import chunkrt
from chunkrt.errors import ModelError
from chunkrt.onnx.importing import import_decoder

FIXTURES = Path(__file__).parents[1] / "data" / "onnx"
SOURCES = ("genai_llama_fp32", "genai_llama_int4", "optimum_llama_fp32", "optimum_llama_int8")
ROOM_BYTES = 3 * 2**29
"""Address space above that of an interpreter with ONNX Runtime; a file of 200 KB must not need more."""


@pytest.fixture(params=["genai_llama_fp32", "optimum_llama_fp32"])
def folder(request, tmp_path):
    return copy_of(request.param, tmp_path)


def copy_of(name, target):
    target.mkdir(exist_ok=True)
    for path in (FIXTURES / name).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def change(folder, edit):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    edit(model.graph)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def assert_refused(folder, match=None):
    with pytest.raises(ModelError, match=match) as caught:
        chunkrt.load(folder, npu="reference", scheme="float")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def weight(graph):
    return max(graph.initializer, key=lambda tensor: np.prod(tensor.dims))


def with_data_at(location, offset="0", length=None):
    def edit(graph):
        tensor = weight(graph)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        length_of = str(4 * np.prod(tensor.dims)) if length is None else length
        for key, value in (("location", location), ("offset", offset), ("length", length_of)):
            tensor.external_data.add(key=key, value=value)

    return edit


@pytest.mark.parametrize("kept", [0, 1, 7, 100, 5000, -1, -1000])
def test_truncated(folder, kept):
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[:kept])
    assert_refused(folder)


def test_truncated_external_data(tmp_path):
    folder = copy_of("genai_llama_fp32", tmp_path)
    os.truncate(folder / "model.onnx.data", 1000)
    assert_refused(folder, "model.onnx.data")


def test_other_content_under_the_name(folder):
    (folder / "model.onnx").write_bytes(b"GGUF" + bytes(1000))
    assert_refused(folder)


def test_missing_external_data(tmp_path):
    folder = copy_of("genai_llama_fp32", tmp_path)
    (folder / "model.onnx.data").unlink()
    assert_refused(folder, "model.onnx.data")


@pytest.mark.parametrize(
    "location", ["../secret", "a/../../secret", "/etc/hostname", "..\\secret", "C:\\secret", "", ".", "model.onnx\0x"]
)
def test_external_data_elsewhere(folder, location):
    (folder.parent / "secret").write_bytes(bytes(10**6))
    change(folder, with_data_at(location))
    assert_refused(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="links need privileges on Windows")
@pytest.mark.parametrize("of_a_folder", [False, True])
def test_external_data_through_a_link(folder, tmp_path_factory, of_a_folder):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_bytes(bytes(10**6))
    (folder / "link").symlink_to(outside if of_a_folder else outside / "secret")
    change(folder, with_data_at("link/secret" if of_a_folder else "link"))
    assert_refused(folder, "link")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes in folders on Windows")
def test_external_data_in_a_pipe(folder):
    os.mkfifo(folder / "pipe")
    change(folder, with_data_at("pipe"))
    assert_refused(folder, "pipe")


@pytest.mark.parametrize(
    ("offset", "length"), [("-1", None), ("999999999999", None), ("0", "1"), ("x", None), ("0", "9" * 30)]
)
def test_external_data_out_of_bounds(folder, offset, length):
    (folder / "data").write_bytes(bytes(20000))
    change(folder, with_data_at("data", offset, length))
    assert_refused(folder)


def with_a_cycle(graph):
    first = next(node for node in graph.node if node.op_type == "MatMul")
    last = [node for node in graph.node if node.op_type == "MatMul"][-2]
    first.input[0] = last.output[0]


def with_a_node_that_reads_itself(graph):
    node = next(node for node in graph.node if node.op_type == "Mul")
    node.input[0] = node.output[0]


def with_two_writers(graph):
    graph.node.append(graph.node[-1])


def with_two_initializers_of_a_name(graph):
    graph.initializer.append(graph.initializer[0])


def with_a_dangling_name(graph):
    next(node for node in graph.node if node.op_type == "MatMul").input[0] = "nowhere"


def with_a_dangling_output(graph):
    graph.output[0].name = "nowhere"


def with_an_absent_operand(graph):
    node = next(node for node in graph.node if node.op_type == "MatMul")
    del node.input[1:]


def with_no_nodes(graph):
    del graph.node[:]


def without_logits(graph):
    del graph.output[0]


def with_a_weight_of_a_billion(graph):
    weight(graph).dims[:] = [10**9, 10**9]


def with_a_weight_of_minus_one(graph):
    weight(graph).dims[:] = [-1, 32]


def with_a_weight_of_strings(graph):
    tensor = weight(graph)
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.STRING, [1], [b"x"]))


def with_a_weight_of_no_type(graph):
    weight(graph).data_type = 99


def with_a_weight_of_another_type(graph):
    products = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    next(t for t in graph.initializer if t.name in products).data_type = TensorProto.INT32


def with_a_narrow_norm(graph):
    tensor = next(t for t in graph.initializer if list(t.dims) == [32])
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT, [3], [1.0] * 3))


def with_a_loop(graph):
    node = next(node for node in graph.node if node.op_type == "Mul")
    body = helper.make_graph([], "body", [], [])
    loop = helper.make_node("Loop", ["", "", node.input[0]], [node.output[0]], body=body)
    node.CopyFrom(loop)


def with_a_billion_in_its_states(graph):
    for value in graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[1].dim_value = 10**9


def with_many_inputs(graph):
    for number in range(1000):
        graph.input.append(helper.make_tensor_value_info(f"past_key_values.{number + 9}.key", 1, [1]))


def without_a_type_of_states(graph):
    next(value for value in graph.input if value.name.startswith("past")).ClearField("type")


def without_a_type_of_elements_of_states(graph):
    next(value for value in graph.input if value.name.startswith("past")).type.tensor_type.ClearField("elem_type")


def with_states_of_text(graph):
    next(
        value for value in graph.input if value.name.startswith("past")
    ).type.tensor_type.elem_type = TensorProto.STRING


def without_a_type_of_tokens(graph):
    next(value for value in graph.input if value.name == "input_ids").ClearField("type")


DAMAGES = [value for name, value in list(globals().items()) if name.startswith(("with_", "without_"))]
DAMAGES = [damage for damage in DAMAGES if damage is not with_data_at]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_graph(folder, damage):
    change(folder, damage)
    assert_refused(folder)


def a_billion_of(op):
    """Return an edit that multiplies the first norm by a value of 10^9 elements."""

    def edit(graph):
        node = next(node for node in graph.node if node.op_type == "MatMul" and "proj" in node.name)
        graph.initializer.append(helper.make_tensor("many", TensorProto.INT64, [1], [10**9]))
        graph.initializer.append(helper.make_tensor("count", TensorProto.INT64, [], [10**9]))
        graph.initializer.append(helper.make_tensor("nought", TensorProto.INT64, [], [0]))
        graph.initializer.append(helper.make_tensor("unit", TensorProto.INT64, [], [1]))
        graph.initializer.append(helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]))
        made = {
            "ConstantOfShape": [helper.make_node("ConstantOfShape", ["many"], ["huge"], "huge")],
            "Expand": [helper.make_node("Expand", ["one", "many"], ["huge"], "huge")],
            "Tile": [helper.make_node("Tile", ["one", "many"], ["huge"], "huge")],
            "Range": [
                helper.make_node("Range", ["nought", "count", "unit"], ["whole"], "whole"),
                helper.make_node("Cast", ["whole"], ["huge"], "huge", to=TensorProto.FLOAT),
            ],
        }[op]
        product = helper.make_node("Mul", [node.input[0], "huge"], ["spoilt"], "spoilt")
        node.input[0] = "spoilt"
        for index, new in enumerate([*made, product]):
            graph.node.insert(index, new)

    return edit


@pytest.mark.sampled(every=9)
@pytest.mark.skipif(sys.platform != "linux", reason="address space is bounded on Linux alone")
@pytest.mark.parametrize("op", ["ConstantOfShape", "Expand", "Tile", "Range"])
def test_values_of_a_billion_elements_take_no_memory(folder, op):
    change(folder, a_billion_of(op))
    ended = run_bounded(folder)
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert ended.stderr.startswith("chunkrt: ")
    assert "'huge'" in ended.stderr or "'whole'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.sampled(every=7)
@pytest.mark.skipif(sys.platform != "linux", reason="address space is bounded on Linux alone")
@pytest.mark.parametrize("damage", [with_a_cycle, with_a_weight_of_a_billion, with_a_billion_in_its_states])
def test_command_line_reports_it_in_one_line(folder, damage):
    change(folder, damage)
    ended = run_bounded(folder)
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert ended.stderr.startswith("chunkrt: ")
    assert len(ended.stderr.splitlines()) == 1
    assert "unexpected" not in ended.stderr


def run_bounded(folder):
    """Run `chunkrt run` on a model, in a process of bounded address space, without waiting for other compilations."""
    program = (
        "import resource, onnx, onnxruntime, numpy, onnx_ir\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {ROOM_BYTES},) * 2)\n"
        "from chunkrt.cli import main\n"
        "main()\n"
    )
    environment = os.environ | {"CHUNKRT_HOME": str(folder.with_name("home"))}
    command = [sys.executable, "-P", "-c", program, "run", str(folder), "-p", "a", "-n", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@settings(
    max_examples=settings().max_examples // 3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    source=st.sampled_from(SOURCES),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=6),
)
def test_flipped_bytes_are_an_error_or_another_model(tmp_path_factory, source, flips):
    """Weights may hold any bytes; a file that is still a model is imported, everything else is a ModelError."""
    folder = copy_of(source, tmp_path_factory.mktemp("flipped"))
    content = bytearray((folder / "model.onnx").read_bytes())
    for place, change_by in flips:
        content[int(place * len(content))] ^= change_by
    (folder / "model.onnx").write_bytes(bytes(content))
    errors = []
    try:
        import_decoder(folder)
    except ModelError as error:
        errors.append(str(error))
    assert not [message for message in errors if "\n" in message or len(message) >= 1000]
