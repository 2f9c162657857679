"""The qnn backend on the emulator: the contract, the NPU's share of nodes, and conversion of values at the edges."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from relative_error import relative_error

from chunkrt.backends.qnn import QnnBackend, find_soc, open_htp
from chunkrt.backends.qnn import backend as backend_module
from chunkrt.backends.qnn import model as model_module
from chunkrt.backends.qnn.executable import Context, QnnExecutable
from chunkrt.backends.qnn.htp_support import FEW_ROWS, graph_rows
from chunkrt.backends.qnn.library import open_session
from chunkrt.backends.qnn.model import npu_model
from chunkrt.engine_directory.store import OUTPUT_STEP_SUFFIX, WeightStore
from chunkrt.errors import BackendError, CompileError, DeviceLostError, PartitionError
from chunkrt.graph.plan import Node, linear_nodes
from chunkrt.quant.scheme import DOWN_PROJ, HEAD, LEVELS, SCHEMES
from chunkrt.testing import check_backend
from chunkrt.testing.calls import Recording
from chunkrt.testing.random_decoders import CONFIG_IN_BLOCKS, random_decoder

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
import onnxruntime as ort

if not open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)

STATIC = [
    *(scheme for scheme in SCHEMES.values() if scheme.is_static),
    replace(SCHEMES["w8a8"], name="mixed", wide=(DOWN_PROJ, "*.qkv_proj.weight", HEAD)),
]
DOWN = "model.layers.0.mlp.down_proj.weight"
OF_16_BITS = [(scheme, DOWN) for scheme in STATIC if scheme.activation_bits_of(DOWN) == 16]
W8A16 = SCHEMES["w8a16"]
SOC = find_soc("SM8650")
CHUNK = 8
HIDDEN = "model.layers.0.output"
by_name = pytest.mark.parametrize("scheme", STATIC, ids=lambda scheme: scheme.name)


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(STATIC, {**CONFIG_IN_BLOCKS, "max_position_embeddings": 512})


@pytest.fixture
def backend(tmp_path):
    return QnnBackend(SOC, contexts=tmp_path / "contexts")


def compile_layer(backend, decoder, scheme=W8A16, chunk_length=CHUNK):
    """Return static.1, with all parts of a layer, and a call of it as it occurs in the decoder."""
    subgraph, weights = decoder.plan.static_subgraphs[1], decoder.weights[scheme.name]
    recording = Recording(decoder.plan, scheme, weights, chunk_length)
    executable = backend.compile(subgraph, decoder.plan, chunk_length, scheme, weights)
    return executable, recording.call(subgraph, 0, chunk_length)


def sum_of_two(decoder):
    """Return a subgraph that adds two values, and its plan."""
    base = decoder.plan.static_subgraphs[1]
    left, right = base.inputs
    names = {"inputs": (left, right), "outputs": (HIDDEN,)}
    add = Node(name="sum", op="Add", domain="", attributes={}, **names)
    subgraph = replace(base, name="sum", nodes=(add,), weights=(), **names)
    return subgraph, replace(decoder.plan, subgraphs=(subgraph,), inputs=(left, right), output=HIDDEN)


@pytest.mark.slow
def test_qnn_conforms(backend):
    check_backend(backend)


def without_edges(model, name, shape, bits):
    """Return a linear's model from the integers of its input to those of its output."""
    model = onnx.load_from_string(model)
    graph, (depth, columns) = model.graph, shape
    first, last = f"{name}.input.quantized", f"{name}.output.quantized"
    order = [node.output[0] for node in graph.node]
    nodes = list(graph.node)[order.index(first) + 1 : order.index(last) + 1]
    dtype = {8: onnx.TensorProto.UINT8, 16: onnx.TensorProto.UINT16}[bits]
    source = onnx.helper.make_tensor_value_info(first, dtype, [CHUNK, depth])
    result = onnx.helper.make_tensor_value_info(last, dtype, [CHUNK, columns])
    for field, content in ((graph.node, nodes), (graph.input, [source]), (graph.output, [result])):
        del field[:]
        field.extend(content)
    return model.SerializeToString()


def linear_alone(decoder, name):
    """Return a subgraph of one linear, and its plan."""
    node = linear_nodes(decoder.plan)[name]
    owner = next(subgraph for subgraph in decoder.plan.subgraphs if node in subgraph.nodes)
    io = {"inputs": node.inputs[:1], "outputs": node.outputs}
    alone = replace(owner, name=name, nodes=(node,), weights=(name,), state=(), **io)
    return alone, replace(decoder.plan, subgraphs=(alone,), inputs=alone.inputs, output=node.outputs[0])


@by_name
def test_linear_is_within_one_step_of_the_exact_integers(backend, decoder, scheme):
    """The model is compiled without its edges of float16: integers over the complete grid in, integers out."""
    weights, plan = decoder.weights[scheme.name], decoder.plan
    names = [name for name in linear_nodes(plan) if ".layers.0." in name]
    assert len(names) == 4
    for name in names:
        bits = scheme.activation_bits_of(name)
        alone, of_one = linear_alone(decoder, name)
        integers, scale = weights.linear(name)
        model = without_edges(npu_model(of_one, alone, CHUNK, scheme, weights), name, integers.shape, bits)
        session = open_session(backend.htp, SOC, model, options={})
        q = np.random.default_rng(0).integers(-LEVELS[bits], LEVELS[bits] + 1, (CHUNK, len(integers)))
        zero, dtype = {8: (128, np.uint8), 16: (32768, np.uint16)}[bits]
        (found,) = session.run(None, {f"{name}.input.quantized": (q + zero).astype(dtype)})
        unit = weights.array(f"{name}.input_step") * scale.astype(np.float64) / weights.array(f"{name}.output_step")
        exact = q @ integers.astype(np.int64) * unit
        # Values that exceed a grid become its last level, or the last value of the integers' type.
        least = np.rint(exact).clip(-zero, LEVELS[bits]) - 1
        most = np.rint(exact).clip(-LEVELS[bits], zero) + 1
        steps = found.astype(np.int64) - zero
        assert (least <= steps).all(), name
        assert (steps <= most).all(), name


@pytest.mark.parametrize(("scheme", "name"), OF_16_BITS, ids=lambda value: getattr(value, "name", ""))
def test_dropped_bits_of_sums_are_compensated(backend, decoder, scheme, name):
    """The mean is in units of the sum, each of which loses 127.5; inputs are small, so that float16 can show it."""
    alone, plan = linear_alone(decoder, name)
    weights = decoder.weights[scheme.name]
    integers, scale = weights.linear(name)
    steps = np.random.default_rng(0).integers(-1000, 1001, (512, len(integers)))
    executable = backend.compile(alone, plan, 512, scheme, weights)
    found = np.zeros((512, integers.shape[1]), np.float32)
    step = weights.array(f"{name}.input_step")
    executable.run({alone.inputs[0]: (steps * step).astype(np.float32)}, {alone.outputs[0]: found})
    off = found / (step * scale) - steps @ integers.astype(np.int64)
    assert abs(off.mean()) < 16


@by_name
def test_no_node_runs_on_the_cpu(backend, decoder, scheme, monkeypatch):
    """ONNX Runtime's own report covers the compiling and the loading session."""
    make, sessions = ort.InferenceSession, []

    def recorded(model, settings):
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        sessions.append(make(model, settings))
        return sessions[-1]

    monkeypatch.setattr(ort, "InferenceSession", recorded)
    compile_layer(backend, decoder, scheme)
    assigned = [session.get_provider_graph_assignment_info() for session in sessions]
    assert [{part.ep_name for part in parts} for parts in assigned] == [{"QNNExecutionProvider"}] * 2
    compiled, loaded = ([node.op_type for part in parts for node in part.get_nodes()] for parts in assigned)
    assert compiled.count("MatMul") == 4
    assert {"RMSNormalization", "Sigmoid", "Split", "Mul", "Add", "Cast"} <= set(compiled)
    assert loaded == ["EPContext"]


def test_node_for_the_cpu_makes_no_session(backend):
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("NonZero", ["x"], ["y"])],
        "for the CPU",
        [value("x", onnx.TensorProto.FLOAT, [4, 4])],
        [value("y", onnx.TensorProto.INT64, [2, None])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    with pytest.raises(Exception, match="fallback to CPU EP has been explicitly disabled"):
        open_session(backend.htp, SOC, model.SerializeToString(), options={})


@by_name
def test_loaded_context_gives_the_bits_of_its_compiler(backend, decoder, scheme, tmp_path):
    subgraph, plan, weights = decoder.plan.static_subgraphs[1], decoder.plan, decoder.weights[scheme.name]
    path = tmp_path / "context.onnx"
    model = npu_model(plan, subgraph, CHUNK, scheme, weights)
    compiled = open_session(backend.htp, SOC, model, options={}, write_context=path)
    loaded = open_session(backend.htp, SOC, path, options={})
    results = []
    for session in (compiled, loaded):
        call = Recording(plan, scheme, weights, CHUNK).call(subgraph, 0, CHUNK)

        def open_context(inputs, outputs, num_places, session=session):
            return Context(subgraph.name, session, inputs, outputs, lambda run: run(), num_places=num_places)

        QnnExecutable(subgraph, plan, CHUNK, {graph_rows(CHUNK, scheme): open_context}).run(call.inputs, call.outputs)
        results.append(call.result_bits())
    assert results[0] == results[1]


def test_unsupported_subgraphs_are_refused_before_compilation(backend, decoder, tmp_path):
    embedding = decoder.plan.subgraphs[0]
    with pytest.raises(
        PartitionError, match=r"embedding: node 'model.embed_tokens.output': the NPU does not support Gather"
    ):
        backend.compile(embedding, decoder.plan, CHUNK, W8A16, decoder.weights["w8a16"])
    assert not (tmp_path / "contexts").exists()


def layer_error(backend, decoder, chunk_length):
    """Return the error of static.1 against the reference (root mean square): the worse of its two outputs."""
    executable, call = compile_layer(backend, decoder, chunk_length=chunk_length)
    executable.run(call.inputs, call.outputs)
    recording = Recording(decoder.plan, W8A16, decoder.weights["w8a16"], chunk_length)
    subgraph = decoder.plan.static_subgraphs[1]
    expected = recording.call(subgraph, 0, chunk_length)
    recording.reference(subgraph).run(expected.inputs, expected.outputs)
    return max(relative_error(call.outputs[name], expected.outputs[name]) for name in subgraph.outputs)


@pytest.mark.sampled(chunk_length=[1, 8, 16, 64])
@pytest.mark.parametrize("chunk_length", [1, 2, 3, 8, 9, 16, 31, 32, 33, 64])
def test_every_chunk_length_is_computed_correctly(backend, decoder, chunk_length):
    assert layer_error(backend, decoder, chunk_length) < 2.0**-8


def test_sixteen_rows_are_padded_because_of_a_compiler_bug(backend, decoder, monkeypatch):
    """If this test fails, the compiler has been fixed, and `graph_rows` can be removed."""
    compile_all_row_counts(monkeypatch)
    assert layer_error(backend, decoder, 16) > 0.5
    assert layer_error(backend, decoder, 15) < 2.0**-8


def compile_all_row_counts(monkeypatch):
    for module in (backend_module, model_module):
        monkeypatch.setattr(module, "graph_rows", lambda rows, scheme: rows)


@pytest.mark.parametrize("scheme", [scheme for scheme in STATIC if scheme.activation_bits == 16], ids=lambda s: s.name)
def test_few_rows_have_the_bits_of_a_large_graph(backend, decoder, scheme, monkeypatch):
    """Graphs of one row do not, so they are not used."""
    subgraph, weights = decoder.plan.static_subgraphs[1], decoder.weights[scheme.name]
    recording = Recording(decoder.plan, scheme, weights, 32)

    def results(rows):
        executable = backend.compile(subgraph, decoder.plan, rows, scheme, weights)
        found = []
        for position in range(0, 32, rows):
            call = recording.call(subgraph, position, rows)
            executable.run(call.inputs, call.outputs)
            found.append(np.hstack([call.outputs[name] for name in subgraph.outputs]))
        return np.concatenate(found)

    expected = results(32)
    for rows in FEW_ROWS:
        np.testing.assert_array_equal(results(rows), expected)
    compile_all_row_counts(monkeypatch)
    assert np.any(results(1) != expected)


@by_name
def test_smallest_graph_that_holds_the_rows_is_run(decoder, scheme, tmp_path, monkeypatch):
    """With 8-bit activations all graphs have multiples of 32 rows."""
    ran = []

    def spied(htp, soc, model, **options):
        session = open_session(htp, soc, model, **options)
        return session if "write_context" in options else CountedSession(session, Path(model).parent.name, ran)

    monkeypatch.setattr("chunkrt.backends.qnn.backend.open_session", spied)
    backend = QnnBackend(SOC, contexts=tmp_path / "contexts", shorter_lengths=(1, 8, 32))
    subgraph, weights = decoder.plan.static_subgraphs[1], decoder.weights[scheme.name]
    executable = backend.compile(subgraph, decoder.plan, 33, scheme, weights)
    assert executable.fixed_length is None
    recording = Recording(decoder.plan, scheme, weights, 33)
    expected = recording.call(subgraph, 0, 33)
    executable.run(expected.inputs, expected.outputs)
    for num_rows in (32, 9, 8, 3, 2, 1):
        call = recording.call(subgraph, 0, num_rows)
        executable.run(call.inputs, call.outputs)
        for name, found in call.outputs.items():
            np.testing.assert_array_equal(found, expected.outputs[name][:num_rows])
    few = [8, 8, 2, 2] if scheme.activation_bits == 16 else [32] * 4
    assert [int(name.split("-r")[1].split("-")[0]) for name in ran] == [64, 32, 32, *few]


class CountedSession:
    """A session that notes the name of its context at each run."""

    def __init__(self, session, name, ran):
        self.io_binding, self._run, self._name, self._ran = session.io_binding, session.run_with_iobinding, name, ran

    def run_with_iobinding(self, binding):
        self._ran.append(self._name)
        self._run(binding)


class SpiedSession:
    """A session that keeps the bindings it returned, and may fail."""

    def __init__(self, session):
        self._session = session
        self.error = None
        self.addresses, self.bindings = [], []

    def io_binding(self):
        self.bindings.append(self._session.io_binding())
        return self.bindings[-1]

    def run_with_iobinding(self, binding):
        if self.error is not None:
            raise self.error
        assert any(binding is each for each in self.bindings)
        self._session.run_with_iobinding(binding)
        self.addresses.append([value.data_ptr() for value in binding.get_outputs()])


@pytest.fixture
def spied(backend, decoder, monkeypatch):
    """Return static.1, its session and a call."""
    sessions = []
    monkeypatch.setattr(
        "chunkrt.backends.qnn.backend.open_session",
        lambda *arguments, **options: (
            sessions.append(SpiedSession(open_session(*arguments, **options))) or sessions[-1]
        ),
    )
    executable, call = compile_layer(backend, decoder)
    return executable, sessions[-1], call


def test_onnx_runtime_shares_the_memory_of_arrays():
    array = np.zeros((4, 8), np.float16)
    value = ort.OrtValue.ortvalue_from_numpy(array)
    assert value.data_ptr() == array.ctypes.data
    array[2, 3] = 7
    assert value.numpy()[2, 3] == 7


def test_buffers_are_bound_once(spied, monkeypatch):
    made = []
    from_numpy = ort.OrtValue.ortvalue_from_numpy
    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", lambda array: made.append(array) or from_numpy(array))
    executable, session, call = spied
    for _ in range(3):
        executable.run(call.inputs, call.outputs)
    assert len(session.addresses) == 3
    assert session.addresses[0] == session.addresses[1] == session.addresses[2]
    assert len(set(session.addresses[0])) == 2
    assert made == []


def test_calls_do_not_allocate(backend, decoder):
    executable, call = compile_layer(backend, decoder, chunk_length=256)
    smallest = min(array.nbytes // 2 for array in (*call.inputs.values(), *call.outputs.values()))
    executable.run(call.inputs, call.outputs)
    tracemalloc.start()
    try:
        for _ in range(3):
            executable.run(call.inputs, call.outputs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < smallest / 2


def test_two_threads_get_the_same_results_as_alone(backend, decoder):
    executable, first = compile_layer(backend, decoder)
    _, second = compile_layer(backend, decoder)
    for array in second.inputs.values():
        array *= -0.5
    calls = (first, second)
    for call in calls:
        executable.run(call.inputs, call.outputs)
    alone, inputs = [call.result_bits() for call in calls], [call.input_bits() for call in calls]
    assert alone[0] != alone[1]

    def run(call):
        for _ in range(8):
            for output in call.outputs.values():
                output[...] = np.nan
            executable.run(call.inputs, call.outputs)
        return call.result_bits()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, calls)) == alone
    assert [call.input_bits() for call in calls] == inputs


@pytest.mark.parametrize("value", [np.nan, np.inf, 70000.0, -1e30])
def test_input_that_exceeds_float16_is_an_error(backend, decoder, value):
    """A grid would silently turn it into a finite number."""
    executable, call = compile_layer(backend, decoder)
    for name, array in call.inputs.items():
        kept = array[3, 2]
        array[3, 2] = value
        with pytest.raises(
            BackendError, match=rf"{name} left the range of float16 on the NPU.*`npu='native'`"
        ) as raised:
            executable.run(call.inputs, call.outputs)
        assert not isinstance(raised.value, DeviceLostError)
        array[3, 2] = kept
    executable.run(call.inputs, call.outputs)
    assert np.isfinite(call.outputs[HIDDEN]).all()


def test_output_that_exceeds_float16_is_an_error(backend, decoder):
    subgraph, plan = sum_of_two(decoder)
    executable = backend.compile(subgraph, plan, CHUNK, W8A16, decoder.weights["w8a16"])
    shape = (CHUNK, CONFIG_IN_BLOCKS["hidden_size"])
    inputs = {name: np.full(shape, 30000, np.float32) for name in subgraph.inputs}
    outputs = {HIDDEN: np.zeros(shape, np.float32)}
    executable.run(inputs, outputs)
    np.testing.assert_array_equal(outputs[HIDDEN], 60000)
    inputs[subgraph.inputs[0]][5, 1] = 40000
    with pytest.raises(BackendError, match=f"{HIDDEN} left the range of float16"):
        executable.run(inputs, outputs)


def test_column_that_exceeds_float16_is_not_compiled(backend, decoder):
    """The NPU would silently multiply by 65504 instead."""
    subgraph, weights = decoder.plan.static_subgraphs[1], decoder.weights["w8a16"]
    down_proj = "model.layers.0.mlp.down_proj.weight"
    assert down_proj in subgraph.weights
    arrays = {name + suffix: array for name in subgraph.weights for suffix, array in weights.parts(name)}
    for reach, is_taken in ((65504, True), (65600, False)):
        arrays[down_proj + OUTPUT_STEP_SUFFIX] = arrays[down_proj + OUTPUT_STEP_SUFFIX].copy()
        arrays[down_proj + OUTPUT_STEP_SUFFIX][3] = reach / LEVELS[16]
        shapes = {name: weights.linear(name)[0].shape for name in linear_nodes(decoder.plan) if name in arrays}
        store = WeightStore(arrays, shapes)
        if is_taken:
            backend.compile(subgraph, decoder.plan, CHUNK, W8A16, store)
            continue
        with pytest.raises(
            CompileError, match=f"outputs of {down_proj} reach 65600 and exceed .* float16.*`npu='native'`"
        ):
            backend.compile(subgraph, decoder.plan, CHUNK, W8A16, store)


def test_no_memory_for_buffers_is_a_lost_device(backend, decoder, monkeypatch):
    def full(*_):
        raise RuntimeError("rpcmem: out of memory")

    monkeypatch.setattr("onnxruntime.OrtValue.ortvalue_from_numpy", full)
    with pytest.raises(DeviceLostError, match=r"refuses the context of static.1: rpcmem: out of memory"):
        compile_layer(backend, decoder)


def test_npu_failure_is_a_lost_device(spied):
    executable, session, call = spied
    session.error = RuntimeError("SSR: subsystem restart")
    with pytest.raises(DeviceLostError, match=r"the NPU failed in subgraph static.1: SSR: subsystem restart"):
        executable.run(call.inputs, call.outputs)
    session.error = None
    executable.run(call.inputs, call.outputs)
    assert np.isfinite(call.outputs[HIDDEN]).all()
