"""Complete decoders over ranks: the logits of several ranks equal those of one, and layers that cannot be split are
rejected."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from block_checkpoint import BlockCheckpoint
from calibrated import calibrated
from fake_backend import LoneExecutor
from fixture_checkpoints import NAMES, checkpoint, expected_logits, input_ids
from one_line import expect_one_line
from ranks_in_threads import on_ranks

import chunkrt
from chunkrt.backends import make_backend
from chunkrt.backends.link import LinkBackend, ranks_of
from chunkrt.checkpoints.catalogue import find, pulled
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.engine_directory.figures import weight_bytes
from chunkrt.engine_directory.manifest import WEIGHTS, read_manifest
from chunkrt.engine_directory.store import WeightStore
from chunkrt.engine_directory.weights import settle, write_weights
from chunkrt.errors import ConfigError, PartitionError
from chunkrt.graph import ops
from chunkrt.graph.decoders import build_decoder, llama
from chunkrt.graph.modules import Share
from chunkrt.graph.ops import trace
from chunkrt.graph.parallel import LinearBase
from chunkrt.graph.partition import Planned, partition
from chunkrt.graph.plan import ALONE, Ranks, expert_weights
from chunkrt.quant.scheme import SCHEMES, Recipe
from chunkrt.runtime.policy import POLICIES, find_policy
from chunkrt.runtime.request import Request
from chunkrt.runtime.state import State
from chunkrt.runtime.tasks import Processor
from chunkrt.testing.random_decoders import CONFIG, CONFIG_IN_BLOCKS, RandomCheckpoint

TOLERANCE = 1e-4
"""Tolerance to Transformers' logits of up to about 7: float32, a few layers of sums over at most 96 products."""
ORDER_TOLERANCE = 1e-5
"""Tolerance for the same sums in another order, relative to the largest logit."""
FOUR_FAMILIES = ("llama_biased", "qwen2", "gemma3_window_5", "phi3_window_5")
WITH_OTHER_MIXERS = {
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "lfm2",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "qwen3_next",
    "qwen3_5_text",
}
"""Families whose mixers have no sum, or gather, in some layers."""
WITH_EXPERTS = {"ernie4_5_moe", "granitemoe", "granitemoehybrid", "granitemoeshared", "lfm2_moe", "olmoe", "qwen2_moe"}
WITH_EXPERTS |= {"deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "qwen3_5_moe_text"}
WITH_EXPERTS |= {"qwen3_moe"}
"""Families with routed experts, which have a sum of their own in addition to that of a shared expert."""
ROUTED = {name for name in NAMES if expert_weights(plan_checkpoint(checkpoint(name), {}).plan)}
LLAMA = checkpoint("llama_gqa")
STATIC = {"npu": "native", "threads": 1, "attention_math": "float32"}
"""Options for equal logits: on one rank, some processors compute attention in bfloat16 by default."""
REAL_NAME = "smollm2-135m-instruct"
REAL_MODEL = pulled(find(REAL_NAME))
TEXT = (Path(__file__).parents[1] / "data" / "evaluation_text.txt").read_text(encoding="utf-8")[:600]
needs_real_model = pytest.mark.skipif(REAL_MODEL is None, reason=f"`chunkrt pull {REAL_NAME}` was not run")


def load(name, communicator=None, **options):
    path = checkpoint(name) if isinstance(name, str) else name
    return chunkrt.load(path, communicator=communicator, **{"scheme": "float", "npu": "reference"} | options)


def assert_same_but_for_order(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ORDER_TOLERANCE * np.abs(expected).max())


def prefill_and_decode(name, communicator=None, **options):
    """Return logits [n, V]: all but the last 3 tokens in chunks of 8, and these one by one."""
    tokens = input_ids(name)
    with load(name, communicator, chunk_length=8, **options) as engine:
        session = engine.session()
        logits = [session.prefill(tokens[:-3], logits="all").logits]
        return np.vstack(logits + [session.prefill([token]).logits for token in tokens[-3:]])


@cache
def of_one_rank(name):
    return prefill_and_decode(name)


@pytest.mark.sampled(every=25)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_ranks_equal_those_of_transformers(name, size):
    found = on_ranks(size, lambda communicator: prefill_and_decode(name, communicator))
    np.testing.assert_allclose(found[0], expected_logits(name), rtol=0, atol=TOLERANCE)
    assert all(np.array_equal(logits, found[0]) for logits in found)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FOUR_FAMILIES)
def test_logits_of_ranks_equal_those_of_one_rank_under_every_policy(name, policy):
    options = {"policy": policy, "threads": 2, "chunks_in_flight": 3, "npu": "onnxrt"}
    found = on_ranks(2, lambda communicator: prefill_and_decode(name, communicator, **options))
    assert_same_but_for_order(found[0], of_one_rank(name))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("npu", ["reference", pytest.param("onnxrt", marks=pytest.mark.slow)])
def test_switches_apply_to_ranks_except_for_the_sums(npu):
    """Sums over ranks stay on the link, regardless of the other operators' runners."""

    def work(communicator, ops):
        with load(LLAMA, communicator, chunk_length=8, npu=npu, ops=ops) as engine:
            subgraph = next(s for s in engine.plan.subgraphs if s.device == "link")
            ((_, choice),) = engine.loaded.dispatcher.runners(subgraph, "link")
            logits = engine.session().prefill(input_ids("llama_gqa"), logits="all").logits
            return logits, (choice.operator, choice.name, choice.form)

    with load(LLAMA, chunk_length=8, npu=npu, ops="none") as engine:
        expected = engine.session().prefill(input_ids("llama_gqa"), logits="all").logits
    for switches in ("none", "none,+linear", "-rms_norm"):
        found = on_ranks(2, lambda communicator, switches=switches: work(communicator, switches))
        assert [sum_ for _, sum_ in found] == [("all_reduce", "link", None)] * 2
        assert_same_but_for_order(found[0][0], expected)
        assert np.array_equal(found[0][0], found[1][0])
    with pytest.raises(ConfigError, match="'all_reduce' requires its form 'link', so -all_reduce has no effect"):
        on_ranks(2, lambda communicator: work(communicator, "-all_reduce"))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_decoder_can_be_split(name):
    """The plan of every rank has the same subgraphs, and on one rank there are no sums."""
    plans = [plan_checkpoint(checkpoint(name), {}, ranks=Ranks(rank, 2)).plan for rank in range(2)]
    assert [s.name for s in plans[0].subgraphs] == [s.name for s in plans[1].subgraphs]
    assert plans[0].tensors == plans[1].tensors
    whole = plan_checkpoint(checkpoint(name), {}).plan
    assert not any(s.device == "link" for s in whole.subgraphs)
    num_sums = {sum(s.device == "link" for s in plan.subgraphs) for plan in plans}
    num_layers = sum(node.op == "CachedAttention" for s in whole.subgraphs for node in s.nodes)
    assert num_sums == {2 * num_layers + 2} or whole.family in WITH_OTHER_MIXERS | WITH_EXPERTS | {"gemma4_text"}


def test_plan_of_one_of_two_ranks():
    plan = plan_checkpoint(LLAMA, {}, ranks=Ranks(1, 2)).plan
    names = [(s.name, s.device, s.is_static) for s in plan.subgraphs][:7]
    assert names == [
        ("embedding", "cpu", False),
        ("link.0", "link", False),
        ("static.0", "npu", True),
        ("dynamic.0", "cpu", False),
        ("static.1", "npu", True),
        ("link.1", "link", False),
        ("static.2", "npu", True),
    ]
    assert [(s.device, s.rows) for s in plan.subgraphs[-2:]] == [("cpu", "R"), ("link", "R")]
    (node,) = plan.subgraphs[5].nodes
    assert (node.domain, node.op, node.inputs[1:], plan.tensors[node.outputs[0]].shape[0]) == (
        "chunkrt",
        "AllReduce",
        ("position",),
        "T",
    )
    assert plan.from_json(plan.to_json()) == plan


def test_decoder_on_the_cpu_alone_has_its_sums_on_the_link():
    plan = plan_checkpoint(LLAMA, {"": "cpu"}, ranks=Ranks(0, 2)).plan
    assert {s.device for s in plan.subgraphs} == {"cpu", "link"}


def executor_of(source, communicator, scheme, folder, backend_name):
    """Return one rank's executor for a checkpoint that is not on disk, and the resulting scheme."""
    ranks = ranks_of(communicator)
    decoder = build_decoder(source, ranks)
    planned = Planned(source=source, decoder=decoder, plan=partition(trace(decoder), family="llama"))
    path = folder / f"{scheme.name}-{ranks.rank}-{ranks.size}"  # Windows does not replace a mapped file
    scheme = settle(planned, scheme)
    write_weights(
        planned.plan, scheme, planned.load, path, load_rotary=planned.load_rotary, load_blocks=planned.load_blocks
    )
    backend, weights = make_backend(backend_name, threads=1), WeightStore.open(path).with_tables(planned.plan)
    executables = {
        s.name: (LinkBackend(communicator) if s.device == "link" else backend).compile(
            s, planned.plan, 8, scheme, weights
        )
        for s in planned.plan.subgraphs
    }
    processors = [Processor(name="cpu", devices=frozenset({"npu", "cpu"}), workers=2)]
    policy = find_policy("look_ahead")
    return LoneExecutor(planned.plan, executables, chunk_length=8, processors=processors, policy=policy), scheme


def logits_of(source, size, folder, scheme="float", backend="reference"):
    tokens = np.random.default_rng(1).integers(0, source.config["vocab_size"], 29)

    def work(communicator):
        executor, settled = executor_of(source, communicator, SCHEMES[scheme], folder, backend)
        return executor.run(Request(tokens, State(executor.plan, 64), logits="all")).logits, settled

    found = on_ranks(size, work)
    assert all(np.array_equal(logits, found[0][0]) for logits, _ in found)
    return found[0]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (14, 2), (5, 5), (3, 1)])
def test_heads_that_ranks_do_not_divide_are_copied_or_padded(heads, kv_heads, size, tmp_path):
    """9 and 3 are SmolLM2-135M's, 14 and 2 Qwen2.5-0.5B's."""
    source = RandomCheckpoint({**CONFIG, "num_attention_heads": heads, "num_key_value_heads": kv_heads})
    expected, _ = logits_of(source, 1, tmp_path)
    found, _ = logits_of(source, size, tmp_path)
    assert_same_but_for_order(found, expected)


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a8-dynamic"])
def test_quantised_ranks_are_as_close_to_the_float_decoder_as_one_rank(scheme, tmp_path):
    """Scales are those of a rank's own rows, blocks are the checkpoint's: ranks lose no more than one rank."""
    source = BlockCheckpoint(
        {name: "Q4_1" for name in RandomCheckpoint(CONFIG_IN_BLOCKS).names() if "proj.weight" in name}
    )
    exact, _ = logits_of(source, 1, tmp_path)
    losses = [
        np.sqrt(np.mean((logits_of(source, size, tmp_path, scheme, "native")[0] - exact) ** 2)) for size in (1, 2)
    ]
    assert 0 < losses[0] < 0.1 * np.abs(exact).max()
    assert losses[1] < 1.25 * losses[0]


def test_linear_has_8_bits_if_a_rank_would_split_its_blocks(tmp_path):
    """96 columns of down_proj are three blocks, which two ranks cannot share; those of o_proj are two."""
    names = ("self_attn.o_proj", "mlp.down_proj")
    types = {f"model.layers.{i}.{name}.weight": "Q4_1" for i in range(2) for name in names}
    source = BlockCheckpoint(types)
    for size, cut in ((1, []), (2, [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)])):
        _, scheme = logits_of(source, size, tmp_path, "w4a8-dynamic", "native")
        assert list(scheme.weights_of_8_bits) == ["lm_head.weight", *cut]


@pytest.mark.sampled(every=15)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", sorted(set(NAMES) - ROUTED))
def test_static_scheme_has_equal_logits_on_ranks_and_on_one_rank(name, size, tmp_path):
    """Every linear has the integers of one rank, so that all logits are equal, bit for bit."""
    options = {"scheme": "w8a16", **STATIC, "calibration": tmp_path / "ranges.npz"}
    calibrated(name, options["calibration"])
    expected = prefill_and_decode(name, **options)
    for found in on_ranks(size, lambda communicator: prefill_and_decode(name, communicator, **options)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
@pytest.mark.parametrize("name", sorted(ROUTED))
def test_experts_of_static_ranks_are_as_close_to_the_float_decoder_as_on_one_rank(name, scheme, size, tmp_path):
    """A rank's slice of an expert measures its own activations, so that logits are close, and not equal bit for bit. A
    changed choice of the router makes the largest differences."""
    options = {"scheme": scheme, **STATIC, "calibration": tmp_path / "ranges.npz"}
    calibrated(name, options["calibration"])
    one = prefill_and_decode(name, **options)
    found = on_ranks(size, lambda communicator: prefill_and_decode(name, communicator, **options))
    assert all(np.array_equal(logits, found[0]) for logits in found)
    exact = expected_logits(name)
    losses = [np.sqrt(np.mean((logits - exact) ** 2)) for logits in (one, found[0])]
    assert 0 < losses[1] < 1.5 * losses[0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "lfm2_moe"])
def test_experts_of_static_ranks_have_the_integers_of_one_rank(name, size, tmp_path):
    """The ranks' columns of gate, of up and rows of down, without padding, are those of the complete experts."""
    options = {"scheme": "w8a16", **STATIC, "calibration": tmp_path / "ranges.npz"}
    calibrated(name, options["calibration"])

    def work(communicator):
        with load(name, communicator, **options) as engine:
            store = WeightStore.open(engine.folder / WEIGHTS)
            names = sorted(expert_weights(engine.plan))
            biases = sorted(n for n in engine.plan.tensors if n.endswith("down_bias"))
            return {n: store.experts(n) for n in names} | {n: store.array(n) for n in biases}

    whole, parts = work(None), on_ranks(size, work)
    for weight, value in whole.items():
        shares = [part[weight] for part in parts]
        if weight.endswith("down_bias"):  # rank 0 adds it
            np.testing.assert_array_equal(shares[0], value)
            assert not np.any(shares[1:])
        elif weight.endswith("down"):
            together = np.concatenate([integers for integers, _ in shares], axis=1)
            np.testing.assert_array_equal(together[:, : value[0].shape[1]], value[0])
            assert not together[:, value[0].shape[1] :].any()
            assert all(np.array_equal(scale, value[1]) for _, scale in shares)
        else:
            for array, of_ranks in zip(value, zip(*shares, strict=True), strict=True):
                halves = [np.split(part, 2, axis=-1) for part in of_ranks]
                for half, own in zip(np.split(array, 2, axis=-1), zip(*halves, strict=True), strict=True):
                    together = np.concatenate(own, axis=-1)
                    np.testing.assert_array_equal(together[..., : half.shape[-1]], half)
                    assert not together[..., half.shape[-1] :].any()


@pytest.mark.parametrize("options", [{"scheme": "w8a8", "outputs": "grid"}, {"scheme": "w4a16"}, {"npu": "onnxrt"}])
def test_static_schemes_and_npus_have_equal_logits_on_ranks(options, tmp_path):
    """`onnxrt` serves as the NPU next to the CPU's backend; 4-bit weights are rounded with compensation."""
    options = {"scheme": "w8a16", **STATIC, "calibration": tmp_path / "ranges.npz", **options}
    calibrated("qwen2", options["calibration"])
    expected = prefill_and_decode("qwen2", **options)
    for found in on_ranks(3, lambda communicator: prefill_and_decode("qwen2", communicator, **options)):
        np.testing.assert_array_equal(found, expected)


class SplitByRows(LinearBase):
    """A linear of a foreign family: partial products under every scheme."""

    def __init__(self, in_features, outputs, ranks, *, depth=None, bias=False, factor=1.0):
        super().__init__(in_features, outputs)
        self.depth = depth or Share.even(in_features, ranks)

    def share(self):
        return Share.whole(self.outputs[""]), self.depth

    def forward(self, hidden):
        partial = ops.matmul(hidden, self.weight.value(), name="partial")
        return ops.all_reduce(partial, name="output") if self.depth.length < self.depth.size else partial


def test_partial_products_are_refused_under_static_schemes(tmp_path, monkeypatch):
    monkeypatch.setattr(llama, "RowParallelLinear", SplitByRows)
    calibrated("llama_gqa", tmp_path / "ranges.npz")
    recipe = Recipe(scheme=SCHEMES["w8a16"])
    compile_checkpoint(LLAMA, recipe, {}, tmp_path / "one", model="toy", calibration=tmp_path / "ranges.npz")
    message = r"^under a static scheme the ranks cannot split model.layers.0.\S+ by its rows, as its family does; use"
    with pytest.raises(ConfigError, match=message):
        compile_checkpoint(
            LLAMA,
            recipe,
            {},
            tmp_path / "two",
            model="toy",
            calibration=tmp_path / "ranges.npz",
            ranks=Ranks(1, 2),
        )
    assert not (tmp_path / "two").exists()


def is_small(plan, name):
    """Return True for a norm, a bias or a rotary table."""
    tensor = plan.tensors[name]
    return len(tensor.shape) == 1 or "norm" in name or bool(tensor.rotary)


EVEN = {"gpt_oss", "lfm2", "llama_biased", "mistral_bfloat16", "olmo2", "qwen2_moe", "qwen3", "qwen3_5"}
"""Checkpoints in which every key/value head, or head of keys in linear attention, is on one of two ranks."""


@pytest.mark.parametrize("name", sorted(EVEN))
def test_memory_of_a_rank_is_an_even_share(name):
    """Within 5 %, in addition to norms, biases and rotary tables; by the plan, and by the file that is loaded."""

    def work(communicator):
        with load(name, communicator) as engine:
            plan, sizes = engine.plan, weight_bytes(engine.plan, engine.scheme)
            small = sum(size for n, size in sizes.items() if is_small(plan, n))
            return sum(sizes.values()) - small, (engine.folder / WEIGHTS).stat().st_size, small

    whole, of_file, small = work(None)
    for found, found_file, found_small in on_ranks(2, work):
        assert found <= 1.05 * whole / 2
        assert found_file - found_small <= 1.05 * (of_file - small) / 2 + 4096  # its header


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "of_weights", "of_caches"),
    [
        (9, 3, 2, 1.33, 1.33),
        (9, 3, 3, 1, 1),
        (9, 3, 4, 1.33, 1.33),
        (14, 2, 3, 1.5, 1.5),
        (14, 2, 4, 1.25, 2),
        (32, 8, 16, 1.2, 2),
        (32, 8, 6, 1.5, 1.5),
    ],
)
def test_memory_of_copied_and_padded_heads_is_that_of_the_page(heads, kv_heads, size, of_weights, of_caches):
    """Factors of the even share in docs/parallel.md, of every rank."""
    source = RandomCheckpoint({**CONFIG, "num_attention_heads": heads, "num_key_value_heads": kv_heads})

    def numbers(ranks):
        plan = partition(trace(build_decoder(source, ranks)), family="llama")
        weights = [t for t in plan.tensors.values() if t.name.endswith(("qkv_proj.weight", "o_proj.weight"))]
        caches = [t for t in plan.tensors.values() if t.kind == "state"]
        return sum(np.prod(t.shape) for t in weights), sum(t.shape[0] for t in caches)

    whole = numbers(ALONE)
    for rank in range(size):
        factors = [size * own / of_one for own, of_one in zip(numbers(Ranks(rank, size)), whole, strict=True)]
        assert factors == pytest.approx([of_weights, of_caches], abs=0.005)


def test_engine_directory_belongs_to_one_rank_and_size(tmp_path):
    folder = tmp_path / "engine"
    recipe = Recipe(scheme=SCHEMES["float"])
    compile_checkpoint(LLAMA, recipe, {}, folder, model="toy", ranks=Ranks(1, 2))
    assert read_manifest(folder).ranks == Ranks(1, 2)
    for size in (1, 2, 3):
        with pytest.raises(ConfigError, match=f"for rank 1 of 2, not for rank 0 of {size}; compile it again"):
            on_ranks(size, lambda communicator: load(folder, communicator, scheme=None))
    with pytest.raises(ConfigError, match="was compiled for rank 1 of 2, not for rank 0 of 1"):
        load(folder, scheme=None)


def test_ranks_compile_into_separate_folders():
    folders = on_ranks(2, lambda communicator: load("llama_gqa", communicator).folder)
    assert len({*folders, load("llama_gqa").folder}) == 3
    assert [read_manifest(folder).ranks for folder in folders] == [Ranks(0, 2), Ranks(1, 2)]


@pytest.mark.parametrize("name", ["reference", "onnxrt", "native"])
def test_only_the_link_sums_over_ranks(name):
    plan = plan_checkpoint(LLAMA, {}, ranks=Ranks(0, 2)).plan
    link = next(s for s in plan.subgraphs if s.device == "link")
    backend = make_backend(name, threads=1)
    assert "chunkrt::AllReduce" in backend.supports(link, plan, SCHEMES["w8a8-dynamic"]).reason
    with pytest.raises(PartitionError, match="AllReduce"):
        backend.compile(link, plan, 8, SCHEMES["w8a8-dynamic"], WeightStore({}, {}))


PLAN_COMMAND = ("plan", LLAMA, "--scheme", "float", "--npu", "reference", "--chunk", "8")


def test_plan_command_shows_the_bytes_of_sums(command):
    hidden = plan_checkpoint(LLAMA, {}).plan.tensors["model.norm.output"].shape[1]
    shown = command(*PLAN_COMMAND, "--ranks", "2", "--rank", "1")
    assert (shown.status, shown.err) == (0, "")
    assert "link.0         link sum" in shown.out
    assert "link: sums 7, gathers 1 over 2 ranks" in shown.out
    assert "this is rank 1 of 2" in shown.out
    summary = json.loads(command(*PLAN_COMMAND, "--ranks", "2", "--json").out)
    assert summary["ranks"] == {"rank": 0, "size": 2}
    for figures in summary["subgraphs"]:
        is_of_logits = figures["name"] == summary["subgraphs"][-1]["name"]
        num_bytes = 4 * plan_checkpoint(LLAMA, {}).plan.vocab_size if is_of_logits else 8 * hidden * 4
        assert figures["sum_bytes"] == (num_bytes if figures["device"] == "link" else 0)
    assert "link" not in command(*PLAN_COMMAND, "--ranks", "1").out


def test_fit_command_checks_the_share_of_a_rank(command):
    """Linears of the NPU are divided evenly, and so are embedding and LM head on the CPU."""
    bytes_of = []
    for size in (1, 2, 4):
        shown = command("fit", "qwen1.5-1.8b", "--soc", "8gen3", "--ranks", str(size), "--ram", "24", "--json")
        assert shown.status == 0, shown.err
        bytes_of.append(json.loads(shown.out)["cpu_weight_bytes"])
    assert bytes_of[1] == pytest.approx(bytes_of[0] / 2, rel=0.05)
    assert bytes_of[2] == pytest.approx(bytes_of[0] / 4, rel=0.05)
    expect_one_line(
        command("fit", "qwen1.5-1.8b", "--soc", "8gen3", "--ranks", "2", "--attention", "npu"),
        "--attention npu is not supported with several ranks; omit it",
        1,
    )


def test_ops_command_shows_the_operator_of_sums(command, tmp_path):
    compile_checkpoint(LLAMA, Recipe(scheme=SCHEMES["w8a8-dynamic"]), {}, tmp_path, model="toy", ranks=Ranks(1, 2))
    for model in ((LLAMA, "--ranks", "2"), (tmp_path,)):
        shown = command("ops", *model, "--json", "--ops", "none")
        assert (shown.status, shown.err) == (0, "")
        (row,) = (row for row in json.loads(shown.out)["operators"] if row["operator"] == "all_reduce")
        assert (row["form"], row["origin"], row["uses"]) == ("link", "chunkrt.backends.link", 7)


def test_subgraphs_are_saved_as_onnx_except_for_sums(command, tmp_path):
    shown = command(*PLAN_COMMAND, "--ranks", "2", "--save-onnx", tmp_path)
    names = [s.name for s in plan_checkpoint(LLAMA, {}, ranks=Ranks(0, 2)).plan.subgraphs]
    files = [f"{i:02}_{name}.onnx" for i, name in enumerate(names) if "link" not in name]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert f"{len(files)} ONNX files written" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "1"), "--rank 1 needs --ranks"),
        (("--ranks", "2", "--rank", "2"), "rank 2 of 2: expected 0 to 1"),
        (("--ranks", "0"), "0 ranks, expected 1 to"),
    ],
)
def test_command_line_rejects_invalid_ranks(arguments, message, command):
    expect_one_line(command(*PLAN_COMMAND, *arguments), message, 1)


@needs_real_model
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a8-dynamic"])
def test_smollm2_on_two_ranks_is_as_close_to_its_float_decoder_as_on_one(scheme):
    """Mean KL divergence in nats; 9 query and 3 key/value heads are padded to 12 and 4."""

    def log_probabilities(size, **options):
        def work(communicator):
            with load(REAL_MODEL, communicator, threads=1, context_length=256, **options) as engine:
                return engine.session().prefill(TEXT, logits="all").logits.astype(np.float64)

        logits = on_ranks(size, work)[0]
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    exact = log_probabilities(1, npu="onnxrt")
    kl = [
        np.mean((np.exp(exact) * (exact - log_probabilities(size, scheme=scheme, npu="native"))).sum(axis=1))
        for size in (1, 2)
    ]
    assert 0 < kl[1] < 1.25 * kl[0] < 0.015
