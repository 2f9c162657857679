"""Memory of a model on a device: every byte counted independently, and the grouping into sessions."""

import dataclasses
import json

import numpy as np
import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.backends.qnn.library import is_installed, open_htp, open_session
from chunkrt.backends.qnn.model import npu_model
from chunkrt.backends.qnn.socs import GB, MIB, SOCS
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.errors import PartitionError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.ops import trace
from chunkrt.graph.partition import partition
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.buffers import BufferLayout
from chunkrt.runtime.state import State
from chunkrt.simulate.fit import MOST_SESSIONS, USABLE_RAM, find_remedy, fit_plan
from chunkrt.testing.random_decoders import CONFIG, RandomCheckpoint, random_decoder

GGUF = checkpoint("llama_biased_gguf")
SM8650 = SOCS["SM8650"]


def llama(hidden, inner, heads, kv_heads, head_dim, layers, vocabulary, context):
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "attention_bias": False,
    }
    source = RandomCheckpoint(CONFIG | sizes)
    return partition(trace(build_decoder(source)), family=source.architecture)


TINY = llama(32, 64, 4, 2, 8, layers=1, vocabulary=50, context=100)
SEVEN_B = llama(4096, 11008, 32, 32, 128, layers=32, vocabulary=32000, context=4096)


def test_recurrent_state_is_float32():
    plan = plan_checkpoint(checkpoint("lfm2"), {}).plan
    held = State(plan, 40, "float16", chunk_length=8)
    assert any(array.dtype == np.float32 for array in held.tensors.values())
    found = fit(plan, "w8a16", chunk=8, context=40)
    assert found.cache_bytes == sum(array.nbytes for array in held.tensors.values())


def fit(plan, scheme, soc=SM8650, *, chunk=32, context=None, ram=64 * GB):
    context = context or plan.context_length
    return fit_plan(plan, SCHEMES[scheme], soc, chunk_length=chunk, context_length=context, ram_bytes=ram)


def test_a_tiny_model_by_hand():
    found = fit(TINY, "w8a16", chunk=8, context=20)
    assert [context.name for context in found.contexts] == ["static.0", "static.1"]
    qkv, rest = (4 + 2 * 2) * 8, [(32, 32), (32, 128), (64, 32)]
    first, second = found.contexts
    assert first.weight_bytes == 32 * qkv
    assert first.context_bytes == first.weight_bytes + 65536 + 24 * qkv
    assert second.weight_bytes == sum(depth * columns for depth, columns in rest)
    assert (
        second.context_bytes == second.weight_bytes + 65536 + 24 * (32 + 128 + 32) + 2 * 32 * 32
    )  # down_proj's limits
    assert (first.spill_bytes, second.spill_bytes) == (0, 0)
    assert first.edge_bytes == 2 * 2 * 8 * (32 + qkv)  # two calls, float16; takes hidden, gives qkv
    assert second.edge_bytes == 2 * 2 * 8 * (32 + 32 + 32)  # inputs hidden and the attention output, output hidden
    assert found.cache_bytes == 2 * 2 * 20 * (2 * 8)  # keys and values, float16, positions, kv heads by head size
    linears = (
        32 * qkv + sum(depth * columns for depth, columns in rest) + 32 * 64
    )  # the LM head's 50 columns are packed to 64
    scales = 4 * (qkv + 32 + 128 + 32 + 50)
    grids = 4 * (5 + 4 + 32)  # an input step and an output step each, but a step for each column of down_proj
    others = 4 * (3 * 32 + 2 * 20 * 4) + 2 * 50 * 32  # norms, rope's tables of the context, embedding
    others += 2 * 8 * (1 + 4)  # recipes of the tables: a magnitude and frequencies in float64
    assert found.cpu_weight_bytes == linears + scales + grids + others
    assert found.npu_bytes == sum(c.context_bytes + c.spill_bytes + c.edge_bytes for c in found.contexts)
    assert found.total_bytes == found.npu_bytes + found.cache_bytes + found.chunk_bytes + found.cpu_weight_bytes
    assert found.problems == []


def test_chunks_in_flight_are_the_executors():
    slot, decode_slot = (BufferLayout(TINY, length).num_bytes for length in (8, 1))
    assert fit(TINY, "w8a16", chunk=8).chunk_bytes == slot * 32 + decode_slot
    forty_cores = dataclasses.replace(SM8650, num_cores=40)
    assert fit(TINY, "w8a16", forty_cores, chunk=8).chunk_bytes == slot * (1 + 2 + 40) + decode_slot


def test_four_bits_take_half_a_byte_and_one_a_block():
    eight, four = fit(TINY, "w8a16"), fit(TINY, "w4a16")
    for at_8, at_4 in zip(eight.contexts, four.contexts, strict=True):
        assert at_4.weight_bytes == at_8.weight_bytes // 2 + at_8.weight_bytes // 32
        assert at_8.context_bytes - at_4.context_bytes == at_8.weight_bytes - at_4.weight_bytes
    on_npu = sum(context.weight_bytes for context in eight.contexts)
    assert four.cpu_weight_bytes == eight.cpu_weight_bytes - on_npu // 2 + on_npu // 32


def test_limits_of_columns_are_kept_for_every_row():
    at_32, at_96 = (fit(TINY, "w8a8", chunk=rows).contexts for rows in (32, 96))
    assert [b.context_bytes - a.context_bytes for a, b in zip(at_32, at_96, strict=True)] == [
        2 * 64 * 64,  # qkv
        2 * 64 * (32 + 128 + 32),
    ]
    assert fit(TINY, "w8a8", chunk=1).contexts[0].context_bytes == at_32[0].context_bytes


def test_working_memory_that_exceeds_vtcm_is_spilled():
    rows, widest = 512, 2 * 11008
    held = rows * widest * 2
    found = fit(SEVEN_B, "w8a16", chunk=rows)
    assert [c.spill_bytes for c in found.contexts[1:-1]] == [held * 3 // 2 - 8 * MIB] * 31
    assert found.contexts[0].spill_bytes == rows * 3 * 4096 * 2 * 3 // 2 - 8 * MIB
    assert fit(SEVEN_B, "w8a16", chunk=32).contexts[1].spill_bytes == 0
    assert fit(SEVEN_B, "w8a8", chunk=rows).contexts[1].spill_bytes == held * 10 - 8 * MIB


def test_seven_billion_weights_share_sessions():
    found = fit(SEVEN_B, "w8a16")
    layer = 4096 * (4096 + 2 * 11008 + 3 * 4096) + 11008 * 4096
    assert sum(context.weight_bytes for context in found.contexts) == 32 * layer
    assert found.problems == []
    assert [names[0] for names in found.sessions] == ["static.0", "static.18"]
    assert [name for names in found.sessions for name in names] == [f"static.{i}" for i in range(33)]
    sizes = {context.name: context.num_bytes for context in found.contexts}
    first, second = (sum(sizes[name] for name in names) for names in found.sessions)
    assert first <= SM8650.npu_window_bytes < first + sizes["static.18"]
    assert second <= SM8650.npu_window_bytes
    assert len(fit(SEVEN_B, "w4a16").sessions) == 1
    assert len(fit(SEVEN_B, "w8a16", SOCS["SM8450"]).sessions) == 4


def test_the_last_context_that_fits_a_session_is_exact():
    sizes = [context.num_bytes for context in fit(TINY, "w8a16").contexts]
    for window, sessions in ((sum(sizes), 1), (sum(sizes) - 1, 2)):
        found = fit(TINY, "w8a16", dataclasses.replace(SM8650, npu_window_bytes=window))
        assert len(found.sessions) == sessions
        assert found.problems == []


def test_smollm2_135m_by_hand():
    smollm2 = llama(576, 1536, 9, 3, 64, layers=30, vocabulary=49152, context=8192)
    found = fit(smollm2, "w8a16")
    assert sum(context.weight_bytes for context in found.contexts) == 30 * 3_538_944
    assert found.cache_bytes == 30 * 2 * 2 * 3 * 64 * 8192
    assert [len(names) for names in found.sessions] == [31]
    measured = {"w8a16": 3_735_552, "w4a16": 2_093_056, "w8a8": 4_009_984}  # a layer's context for SM8650, 32 rows
    for scheme, num_bytes in measured.items():
        assert num_bytes <= fit(smollm2, scheme).contexts[1].context_bytes <= 1.02 * num_bytes


def test_problems_list_all_exceeded_limits():
    small = dataclasses.replace(SM8650, npu_window_bytes=190 * MIB)
    found = fit(SEVEN_B, "w8a16", small, ram=10 * GB)
    assert found.problems == [
        f"static.1 takes {found.contexts[1].num_bytes / 1e6:.1f} MB of an NPU session's 199.2 MB",
        f"the model takes 33 NPU sessions of 199.2 MB, but only {MOST_SESSIONS} are available",
        f"the model takes {found.total_bytes / GB:.2f} GB of 6.00 GB usable RAM",
    ]
    assert find_remedy(SEVEN_B, SCHEMES["w8a16"], found) == ""


def test_remedies_are_the_least_that_helps_and_do_help():
    plenty = fit(SEVEN_B, "w8a16")
    for ram, remedy in (
        (plenty.total_bytes / 0.6 - GB, "--context 2048"),
        (15 * GB, "--scheme w4a16 --context 2048"),
        (8 * GB, ""),
    ):
        found = fit(SEVEN_B, "w8a16", ram=int(ram))
        assert found.problems
        assert find_remedy(SEVEN_B, SCHEMES["w8a16"], found) == remedy
    assert fit(SEVEN_B, "w8a16", context=2048, ram=int(plenty.total_bytes / 0.6 - GB)).problems == []
    assert fit(SEVEN_B, "w4a16", context=2048, ram=15 * GB).problems == []


def test_remedies_for_an_engine_directory_leave_its_scheme():
    plenty = fit(SEVEN_B, "w8a16")
    for ram, remedy in (
        (plenty.total_bytes / 0.6 - GB, "--context 2048"),
        (15 * GB, "compiling the checkpoint again with --scheme w4a16 --context 2048"),
    ):
        found = fit(SEVEN_B, "w8a16", ram=int(ram))
        assert find_remedy(SEVEN_B, SCHEMES["w8a16"], found, is_compiled=True) == remedy


def test_remedies_go_by_the_bits_that_the_scheme_has_and_not_by_its_name():
    with_8_bits = dataclasses.replace(SCHEMES["w4a16"], weights_of_8_bits=("*",))
    found = fit_plan(SEVEN_B, with_8_bits, SM8650, chunk_length=32, context_length=4096, ram_bytes=15 * GB)
    assert find_remedy(SEVEN_B, with_8_bits, found) == "--scheme w4a16 --context 2048"


def test_unsupported_subgraph_is_refused_by_node():
    odd = llama(32, 72, 4, 2, 8, layers=1, vocabulary=50, context=100)
    with pytest.raises(PartitionError, match=r"the NPU cannot run static\.1: .* blocks of 32"):
        fit(odd, "w4a16")
    with pytest.raises(PartitionError, match="use a static scheme: w8a16, w8a8, w4a16"):
        fit(TINY, "w8a8-dynamic")
    found = fit(odd, "w8a16", ram=GB // 1000)
    assert find_remedy(odd, SCHEMES["w8a16"], found) == ""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a16"])
def test_contexts_are_as_large_as_estimated(scheme, chunk, tmp_path):
    if not is_installed():
        pytest.skip("onnxruntime-qnn, which holds Qualcomm's compiler, is not installed")
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
    decoder = random_decoder([SCHEMES[scheme]], CONFIG | sizes | {"head_dim": 64, "attention_bias": False})
    wrapper, subgraph = tmp_path / "context.onnx", decoder.plan.subgraphs[3]
    model = npu_model(decoder.plan, subgraph, chunk, SCHEMES[scheme], decoder.weights[scheme])
    open_session(open_htp(), SM8650, model, options={}, write_context=wrapper)
    (binary,) = tmp_path.glob("*.bin")
    (estimated,) = (c for c in fit(decoder.plan, scheme, chunk=chunk).contexts if c.name == subgraph.name)
    assert binary.stat().st_size <= estimated.context_bytes <= 1.15 * binary.stat().st_size


def test_command_reports_a_model_that_fits(command):
    finished = command("fit", GGUF, "--soc", "8gen3")
    assert (finished.status, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert lines[0].startswith("SM8650 (8 Gen 3), scheme w8a16, chunks of 32, context of ")
    assert lines[-1] == "fits"
    assert any(line.startswith("RAM ") and line.endswith("60% of 12 GB, a guess") for line in lines)
    assert "NPU session 1: static.0 to static.2" in finished.out


def test_command_reports_a_model_that_does_not_fit(command):
    finished = command("fit", GGUF, "--soc", "SM8650", "--ram", "0.0001")
    assert (finished.status, finished.err) == (3, "")
    assert finished.out.splitlines()[-1].startswith("does not fit: the model takes 1.2 MB of 0.1 MB usable RAM; try ")


def test_the_command_advises_no_scheme_for_an_engine_directory(command):
    with chunkrt.load(GGUF, npu="native", scheme="w8a16") as engine:
        pass
    sizes = json.loads(command("fit", engine.folder, "--soc", "SM8650", "--json").out)
    four_bits = json.loads(command("fit", GGUF, "--soc", "SM8650", "--scheme", "w4a16", "--json").out)
    ram = (sizes["total_bytes"] + four_bits["total_bytes"]) / 2 / USABLE_RAM / GB
    finished = command("fit", engine.folder, "--soc", "SM8650", "--ram", ram)
    assert finished.out.splitlines()[-1].endswith("; try compiling the checkpoint again with --scheme w4a16")


def test_the_command_in_json(command):
    finished = command("fit", GGUF, "--soc", "SM8550", "--scheme", "w8a8", "--chunk", 8, "--context", 32, "--json")
    assert (finished.status, finished.err) == (0, "")
    found = json.loads(finished.out)
    expected = fit(plan_checkpoint(GGUF, {}).plan, "w8a8", SOCS["SM8550"], chunk=8, context=32, ram=12 * GB)
    assert found == json.loads(json.dumps(expected.to_dict())) | {"remedy": ""}
    assert (found["fits"], found["problems"], found["soc"]["name"]) == (True, [], "SM8550")
    refused = command("fit", GGUF, "--soc", "SM8550", "--ram", "0.0001", "--json")
    assert (refused.status, json.loads(refused.out)["fits"]) == (3, False)


def test_the_command_takes_an_engine_directory(command, tmp_path):
    with chunkrt.load(GGUF, npu="native", scheme="w8a8", outputs="grid") as engine:
        finished = command("fit", engine.folder, "--soc", "SM8650", "--json")
    assert json.loads(finished.out)["scheme"] == "w8a8"
    other = command("fit", engine.folder, "--soc", "SM8650", "--scheme", "w8a16")
    assert other.status == 1
    assert "was compiled under 'w8a8'" in other.err


def test_the_command_refuses_an_engine_with_outputs_in_float(command):
    with chunkrt.load(GGUF, npu="native", scheme="w8a8") as engine:
        finished = command("fit", engine.folder, "--soc", "SM8650", "--json")
    (line,) = finished.err.splitlines()
    assert (finished.status, finished.out) == (1, "")
    assert "into float32" in line
    assert "--outputs grid" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--soc", "SM8651"), "unknown SoC 'SM8651'; did you mean 'SM8650'? there are: SM8450, "),
        (("--soc", "SM8735"), "the NPU of SM8735 has no float16"),
        (("--soc", "SM8650", "--context", 10**6), "--context is 1000000, but the model takes at most "),
        (("--soc", "SM8650", "--context", 8), "--chunk is 32, longer than the context of 8"),
        (("--soc", "SM8650", "--context", 0), "--context is 0, expected at least 1"),
        (("--soc", "SM8650", "--chunk", 0), "--chunk is '0', expected numbers of tokens, at least 1"),
        (("--soc", "SM8650", "--chunk", 10**6), "--chunk is 1000000, longer than the context of "),
        (("--soc", "SM8650", "--ram", 0), "--ram is 0, expected a number of GB above 0"),
        (("--soc", "SM8650", "--ram", "nan"), "--ram is nan, expected a number of GB above 0"),
    ],
)
def test_bad_input_prints_one_line(command, arguments, message):
    expect_one_line(command("fit", GGUF, *arguments), f"chunkrt: {message}", 1)


def test_a_wrong_command_line_lists_the_choices(command):
    assert command("fit", GGUF).status == 2
    finished = command("fit", GGUF, "--soc", "SM8650", "--scheme", "float")
    assert finished.status == 2
    assert "'w8a16', 'w8a8', 'w4a16'" in finished.err
