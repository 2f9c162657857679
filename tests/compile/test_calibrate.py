"""Calibration: compared with a decoder written by hand; its streaming; and its cache."""

import io
import json
import logging
import shutil
import tracemalloc
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from fixture_checkpoints import checkpoint
from numpy.lib import format as npy
from random_folders import write_folder

from chunkrt.checkpoints.catalogue import find, pulled
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.checkpoints.source import weights_digest
from chunkrt.compile import calibrate as calibration_module
from chunkrt.compile.calibrate import WINDOW_LENGTH, cached_calibration, calibrate, text_digest
from chunkrt.compile.calibration_tokens import DEFAULT_NUM_TOKENS, calibration_tokens, shipped_text
from chunkrt.compile.compiler import compile_checkpoint, plan_checkpoint
from chunkrt.errors import ConfigError, ModelError, QuantizationError
from chunkrt.graph.plan import linear_nodes
from chunkrt.quant.calibration import METHODS, SHADOW_SHARE, Calibration, num_hot_channels
from chunkrt.quant.folding import Folding
from chunkrt.quant.scheme import SCHEMES, Recipe
from chunkrt.tokenizer import Tokenizer

FOLDER, GGUF = checkpoint("llama_gqa"), checkpoint("llama_biased_gguf")
TEXT = "A short text.\n\nIn three parts, two of which\nare short.\n\nAnd an end."
REAL_NAME = "smollm2-135m-instruct"
REAL_MODEL = pulled(find(REAL_NAME))
TOKENS = np.random.default_rng(3).integers(0, 128, 300)
IDS = np.random.default_rng(4).integers(0, 128, 20)


def loader(planned):
    return planned.load


def run(planned, tokens, **options):
    return calibrate(planned.plan, loader(planned), np.asarray(tokens, np.int64), model="toy", **options)


def by_hand(folder, tokens):
    """Compute every value of a window of llama_gqa, float32 [T, N], by its name in a plan."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, num_rows = config["hidden_size"] // num_heads, len(tokens)
    angles = np.outer(np.arange(num_rows), config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim))[:, None]
    seen = {}

    def keep(name, values):
        seen[name] = values
        return values

    def linear(x, *names):
        return np.concatenate([x @ tensors[f"{name}.weight"].T for name in names], axis=1)

    def norm(name, x):
        root = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + config["rms_norm_eps"])
        return keep(f"{name}.output", x / root * tensors[f"{name}.weight"])

    def rope(x):
        a, b = np.split(x, 2, axis=2)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], 2)

    hidden = keep("model.embed_tokens.output", tensors["model.embed_tokens.weight"][tokens])
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        names = (f"{p}.self_attn.{n}_proj" for n in "qkv")
        qkv = keep(f"{p}.self_attn.qkv_proj.output", linear(norm(f"{p}.input_layernorm", hidden), *names))
        heads = qkv.reshape(num_rows, -1, head_dim)
        q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        q, k = rope(q), rope(k)
        attended = np.empty_like(q)
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            for row in range(num_rows):
                scores = np.exp(k[: row + 1, group] @ q[row, head] / np.sqrt(head_dim))
                attended[row, head] = scores / scores.sum() @ v[: row + 1, group]
        attended = keep(f"{p}.self_attn.attention", attended.reshape(num_rows, -1))
        projected = keep(f"{p}.self_attn.o_proj.output", linear(attended, f"{p}.self_attn.o_proj"))
        hidden = keep(f"{p}.attention_residual", hidden + projected)
        normed = norm(f"{p}.post_attention_layernorm", hidden)
        both = keep(f"{p}.mlp.gate_up_proj.output", linear(normed, f"{p}.mlp.gate_proj", f"{p}.mlp.up_proj"))
        gate, up = (
            keep(f"{p}.mlp.{name}", half) for name, half in zip(("gate", "up"), np.split(both, 2, 1), strict=True)
        )
        silu = keep(f"{p}.mlp.silu", gate * keep(f"{p}.mlp.silu_sigmoid", 1 / (1 + np.exp(-gate))))
        down = keep(f"{p}.mlp.down_proj.output", linear(keep(f"{p}.mlp.gated", silu * up), f"{p}.mlp.down_proj"))
        hidden = keep(f"{p}.output", hidden + down)
    keep("lm_head.output", linear(keep("last_hidden", norm("model.norm", hidden)), "lm_head"))
    return seen


@pytest.fixture(scope="module")
def planned():
    return plan_checkpoint(FOLDER, {})


@pytest.fixture(scope="module")
def planned_gguf():
    return plan_checkpoint(GGUF, {})


@pytest.fixture
def long_context(tmp_path):
    """Return the same decoder with a context longer than a window."""
    folder = shutil.copytree(FOLDER, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2 * WINDOW_LENGTH}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder of calibrations in an empty cache; it may not exist yet."""
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibrations"


def check_against_hand(calibration, folder, windows, planned):
    seen = [by_hand(folder, window) for window in windows]
    linears = linear_nodes(planned.plan).values()
    assert calibration.peaks.keys() == seen[0].keys()
    for name, peak in calibration.peaks.items():
        assert peak == pytest.approx(max(np.abs(values[name]).max() for values in seen), rel=1e-4), name
    assert calibration.limits == {node.inputs[0]: calibration.peaks[node.inputs[0]] for node in linears}
    assert calibration.column_peaks.keys() == {node.outputs[0] for node in linears}
    for name, limits in calibration.column_peaks.items():
        expected = np.max([np.abs(values[name]).max(axis=0) for values in seen], axis=0)
        np.testing.assert_allclose(limits, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert limits.dtype == np.float32
        assert limits.max() == calibration.peaks[name]
    assert calibration.channel_peaks.keys() == {node.inputs[0] for node in linears}
    for name, peaks in calibration.channel_peaks.items():
        expected = np.max([np.abs(values[name]).max(axis=0) for values in seen], axis=0)
        np.testing.assert_allclose(peaks, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    check_shadows_against_hand(calibration, folder, seen, planned)


def check_shadows_against_hand(calibration, folder, seen, planned):
    """Check the limit of a shadowed linear's grid, the peaks of its main half, and the channels that exceed it most
    often."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    merged = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    narrow = {w: n for w, n in linear_nodes(planned.plan).items() if w != "lm_head.weight"}
    assert calibration.shadow_limits.keys() == calibration.hot_channels.keys() == calibration.limits.keys()
    assert calibration.shadowed_column_peaks.keys() == {node.outputs[0] for node in narrow.values()}
    for weight, node in narrow.items():
        source, result = node.inputs[0], node.outputs[0]
        x = np.abs(np.concatenate([values[source] for values in seen]))
        limit = calibration.shadow_limits[source]
        # 5 in 1000 values are above the limit; it is the edge of a bin, with 128 bins an octave.
        quantile = np.sort(x, axis=None)[int(np.ceil((1 - SHADOW_SHARE) * x.size)) - 1]
        assert quantile * (1 - 1e-4) <= limit <= float(quantile) * (1 + 2**-7) * (1 + 1e-4), source
        assert limit <= calibration.peaks[source]
        assert (x > limit * (1 + 1e-4)).sum() <= SHADOW_SHARE * x.size
        times = (x > limit * (1 + 1e-4)).sum(axis=0)
        most = (x > limit * (1 - 1e-4)).sum(axis=0)
        hot = calibration.hot_channels[source]
        assert hot.dtype == np.int32
        assert (len(hot), len(set(hot))) == (num_hot_channels(x.shape[1]),) * 2
        assert (np.diff(hot) > 0).all()
        others = np.delete(np.arange(x.shape[1]), hot)
        assert most[hot].min() >= times[others].max(initial=0), source
        kind = weight.split(".")[-2]
        path = weight.removesuffix(f"{kind}.weight")
        w = np.concatenate([tensors[f"{path}{name}.weight"] for name in merged.get(kind, [kind])]).T
        expected = np.max([np.abs(v[source].clip(-limit, limit) @ w).max(axis=0) for v in seen], axis=0)
        np.testing.assert_allclose(calibration.shadowed_column_peaks[result], expected, rtol=1e-4, atol=1e-5)


def test_windows_no_longer_than_the_context(planned):
    assert planned.plan.context_length == 128
    check_against_hand(
        run(planned, TOKENS, method="absmax"), FOLDER, [TOKENS[:128], TOKENS[128:256], TOKENS[256:]], planned
    )


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_text_shorter_than_a_window(planned, num_tokens):
    check_against_hand(run(planned, TOKENS[:num_tokens], method="absmax"), FOLDER, [TOKENS[:num_tokens]], planned)


def test_text_that_windows_do_not_divide(long_context):
    planned = plan_checkpoint(long_context, {})
    tokens = np.resize(TOKENS, WINDOW_LENGTH + 9)
    windows = [tokens[:WINDOW_LENGTH], tokens[WINDOW_LENGTH:]]
    check_against_hand(run(planned, tokens, method="absmax"), long_context, windows, planned)


def test_calibration_describes_itself(planned):
    found = run(planned, TOKENS[:9], method="mse")
    assert (found.model, found.method) == ("toy", "mse")
    np.testing.assert_array_equal(found.token_ids, TOKENS[:9])
    assert (found.equalisation, found.is_rotated, found.folding) == (None, False, Folding())
    assert text_digest(TOKENS[:9]) == text_digest(TOKENS[:9].astype(np.int32)) != text_digest(TOKENS[:8])


def test_methods_narrow_limits_and_keep_columns(planned):
    widest = run(planned, TOKENS, method="absmax")
    for method in ("percentile", "mse"):
        found = run(planned, TOKENS, method=method)
        assert all(0 < limit <= widest.limits[name] for name, limit in found.limits.items())
        assert sum(limit < widest.limits[name] for name, limit in found.limits.items()) > 4
        assert found.peaks == widest.peaks
        assert all((peaks == widest.column_peaks[name]).all() for name, peaks in found.column_peaks.items())


def test_weights_are_loaded_once_and_dropped_after_their_last_subgraph(planned):
    load, plan, alive, loaded = loader(planned), planned.plan, weakref.WeakValueDictionary(), []

    def watch(name):
        index = next(i for i, subgraph in enumerate(plan.subgraphs) if name in subgraph.weights)
        needed = {weight for subgraph in plan.subgraphs[index:] for weight in subgraph.weights}
        assert set(alive) <= needed
        loaded.append(name)
        alive[name] = values = load(name).copy()
        return values

    calibrate(plan, watch, TOKENS, model="toy")
    assert sorted(loaded) == sorted(tensor.name for tensor in plan.tensors.values() if tensor.kind == "weight")
    assert not alive


def test_progress_counts_subgraphs(planned):
    steps = []
    run(planned, TOKENS[:3], progress=lambda done, total: steps.append((done, total)))
    count = len(planned.plan.subgraphs)
    assert steps == [(done, count) for done in range(count + 1)]


@pytest.mark.parametrize(("tokens", "message"), [([], "has no tokens"), ([5, 128], "token id 128 is outside")])
def test_invalid_tokens(planned, tokens, message):
    with pytest.raises(ConfigError, match=message):
        run(planned, tokens)


@pytest.mark.parametrize("wrong", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("method", METHODS)
def test_value_that_is_not_finite(planned, wrong, method):
    def load(name):
        values = loader(planned)(name)
        return np.full_like(values, wrong) if name == "model.layers.1.mlp.down_proj.weight" else values

    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.down_proj\.output is not finite"):
        calibrate(planned.plan, load, TOKENS, model="toy", method=method)


def same(left, right):
    """Return whether two calibrations are equal, bit for bit."""

    def parts(calibration):
        found = {name: getattr(calibration, name) for name in vars(calibration) if name != "folding"}
        return found | {"folding": calibration.folding.arrays()}

    def equal(one, other):
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        if isinstance(one, np.ndarray):
            return (one.dtype, one.shape) == (other.dtype, other.shape) and np.array_equal(one, other)
        return type(one) is type(other) and one == other

    return equal(parts(left), parts(right))


@pytest.mark.parametrize("method", METHODS)
def test_saving_and_loading_round_trip(planned, tmp_path, method):
    made = run(planned, TOKENS, method=method)
    made.save(tmp_path / "deep" / "file.npz")
    assert same(Calibration.load(tmp_path / "deep" / "file.npz"), made)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file.npz"]


def change_tensor(folder, change, name="model.layers.0.self_attn.k_proj.weight"):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors[name])
    safetensors.numpy.save_file(tensors, path)


def scale(values):
    values *= np.float32(1.001)


def test_calibration_belongs_to_its_own_weights(tmp_path):
    """This holds even if shapes and all tensors except one are the same."""
    mine = write_folder(tmp_path / "mine")
    calibration, _ = cached_calibration(plan_checkpoint(mine, {}), mine, model="mine", token_ids=IDS % 61)
    calibration.save(tmp_path / "cal.npz")
    recipe = Recipe(scheme=replace(SCHEMES["w8a16"], equalisation=None))
    copy = shutil.copytree(mine, tmp_path / "copy")
    compile_checkpoint(copy, recipe, {}, tmp_path / "engine", model="copy", calibration=tmp_path / "cal.npz")
    change_tensor(copy, scale)
    with pytest.raises(QuantizationError, match=r"was made for mine with other weights than those of .*copy; run"):
        compile_checkpoint(copy, recipe, {}, tmp_path / "other", model="copy", calibration=tmp_path / "cal.npz")


@pytest.mark.parametrize("change", [scale, lambda values: values.fill(0)])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_digests_distinguish_weights(tmp_path, name, change):
    folder = write_folder(tmp_path / "model")
    before = weights_digest(open_checkpoint(folder))
    assert weights_digest(open_checkpoint(folder)) == before
    change_tensor(folder, change, name)
    assert weights_digest(open_checkpoint(folder)) != before


def test_older_format_requires_recalibration(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("chunkrt.quant.calibration.FORMAT", 4)
    run(planned, TOKENS[:9]).save(tmp_path / "file.npz")
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"its format is 4, expected 6.*run `chunkrt calibrate` again"):
        Calibration.load(tmp_path / "file.npz")


def test_weight_that_is_not_finite_is_named_instead_of_a_node(tmp_path):
    folder = write_folder(tmp_path / "model")
    change_tensor(folder, lambda values: values.__setitem__((0, 0), np.inf))
    with pytest.raises(
        QuantizationError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight holds values that are not"
    ):
        cached_calibration(plan_checkpoint(folder, {}), folder, model="toy", token_ids=IDS % 61)


def test_damage_never_loads_wrongly(planned, tmp_path):
    path = tmp_path / "file.npz"
    made = run(planned, TOKENS[:9])
    made.save(path)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [content[:length] for length in (0, 1, 100, len(content) // 2, len(content) - 1)]
    for position in (*range(40), *rng.integers(0, len(content), 150), *range(len(content) - 100, len(content))):
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.integers(8)
        damaged.append(bytes(flipped))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            found = Calibration.load(path)
        except ModelError:
            refused += 1
        else:
            assert same(found, made)
    assert refused > len(damaged) / 2


def test_files_that_are_no_calibrations(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", about=np.array('{"format": 0}'))
    (tmp_path / "text.npz").write_text("not at all")
    for path in (*tmp_path.iterdir(), tmp_path, tmp_path / "missing.npz"):
        with pytest.raises(ModelError, match="is not a calibration") as raised:
            Calibration.load(path)
        assert "pickle" not in str(raised.value)


def first(values, number):
    """Return a mapping with another first value."""
    name = next(iter(values))
    return {**values, name: number(values[name])}


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["peaks", "limits", "shadow_limits"])
def test_impossible_limits_are_refused(planned, tmp_path, field, number):
    made = run(planned, TOKENS[:9])
    replace(made, **{field: first(getattr(made, field), lambda _: number)}).save(tmp_path / "file.npz")
    with pytest.raises(ModelError, match=f"is not a calibration \\({field} are not all finite"):
        Calibration.load(tmp_path / "file.npz")


@pytest.mark.parametrize("field", ["peaks", "limits", "shadow_limits"])
def test_limits_that_are_all_zero_are_refused(planned, tmp_path, field):
    made = run(planned, TOKENS[:9])
    replace(made, **{field: dict.fromkeys(getattr(made, field), 0.0)}).save(tmp_path / "file.npz")
    with pytest.raises(ModelError, match="some above 0"):
        Calibration.load(tmp_path / "file.npz")


@pytest.mark.parametrize("field", ["column_peaks", "channel_peaks", "shadowed_column_peaks", "hot_channels"])
def test_lists_of_other_things_are_refused(planned, tmp_path, field):
    made = run(planned, TOKENS[:9])
    for wrong in (lambda array: -1 - array, lambda array: array[None], lambda array: array.astype(str)):
        replace(made, **{field: first(getattr(made, field), wrong)}).save(tmp_path / "file.npz")
        with pytest.raises(ModelError, match=f"is not a calibration \\({field} of"):
            Calibration.load(tmp_path / "file.npz")


def test_impossible_histograms_are_refused(planned, tmp_path):
    made = run(planned, TOKENS[:9])
    for wrong in (
        lambda found: found[0],
        lambda found: found[:, :0],
        lambda found: found[:, ::-1],
        lambda found: -found,
        lambda found: found + 2**15,
        lambda found: found * [[1], [0]],
        lambda found: found.astype(np.float32),
    ):
        replace(made, histograms=first(made.histograms, wrong)).save(tmp_path / "file.npz")
        with pytest.raises(ModelError, match=r"is not a calibration \(the histogram of"):
            Calibration.load(tmp_path / "file.npz")


@pytest.mark.parametrize("count", [2**53, 2**31, 2])
def test_header_that_claims_another_size_is_damage_and_not_too_little_memory(planned, tmp_path, count):
    run(planned, TOKENS[:9]).save(tmp_path / "sound.npz")
    header = io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
    with zipfile.ZipFile(tmp_path / "sound.npz") as sound, zipfile.ZipFile(tmp_path / "file.npz", "w") as archive:
        for name in sound.namelist():
            is_last = name == "token_ids.npy"
            archive.writestr(name, header.getvalue() + bytes(72) if is_last else sound.read(name))
    with pytest.raises(ModelError, match=rf"token_ids\.npy claims to hold int64 \({count},\), which is not its size"):
        Calibration.load(tmp_path / "file.npz")


@pytest.mark.parametrize("num_tokens", [1 << 24, pytest.param(1 << 27, marks=pytest.mark.slow)])
def test_archive_that_would_inflate_is_refused_before_it_does(planned, tmp_path, num_tokens):
    made = run(planned, TOKENS[:9])
    replace(made, token_ids=np.zeros(num_tokens, np.int64)).save(tmp_path / "file.npz")
    assert (tmp_path / "file.npz").stat().st_size < 1 << 21
    tracemalloc.start()
    with pytest.raises(ModelError, match="inflate to more than 16 times"):
        Calibration.load(tmp_path / "file.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


def test_unwritable_path(planned, tmp_path):
    (tmp_path / "file").write_text("")
    made = run(planned, TOKENS[:2])
    for path in (tmp_path / "file" / "deeper.npz", tmp_path):
        with pytest.raises(ModelError, match="cannot write the calibration"):
            made.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_second_calibration_comes_from_the_cache(planned_gguf, cache, monkeypatch):
    made, path = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr(calibration_module, "calibrate", lambda *_, **__: pytest.fail("computed again"))
    found, again = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    assert again == path
    assert same(found, made)
    renamed, _ = cached_calibration(planned_gguf, GGUF, model="another name", token_ids=IDS)
    assert renamed.model == "another name"


def test_cache_distinguishes_calibrations(cache, tmp_path):
    copy = Path(shutil.copy(GGUF, tmp_path / GGUF.name))
    planned = plan_checkpoint(copy, {})

    def path_of(**options):
        return cached_calibration(planned, copy, model="toy", **{"token_ids": IDS} | options)[1]

    paths = [
        path_of(),
        path_of(token_ids=IDS[:5]),
        path_of(token_ids=IDS[::-1].copy()),
        *(path_of(method=m) for m in METHODS if m != "mse"),
        path_of(is_rotated=True),
        path_of(equalisation=0.5),
        path_of(equalisation=0.25),
        path_of(equalisation=0.5, is_rotated=True),
    ]
    copy.touch()
    assert path_of() == paths[0], "its content counts"
    assert len(set(paths)) == len(paths) == len(list(cache.iterdir()))
    assert path_of() == path_of(token_ids=IDS.astype(np.int32)) == paths[0]


def test_built_in_text_is_the_default(planned_gguf, cache):
    found, _ = cached_calibration(planned_gguf, GGUF, model="toy")
    np.testing.assert_array_equal(found.token_ids, calibration_tokens(planned_gguf, shipped_text(), None))


def folded(planned, calibration):
    """Return weights after a calibration's folding."""
    load = loader(planned)
    return lambda name: calibration.folding.apply(name, load(name))


def test_equalisation_and_rotation_are_stored_with_their_folding(planned_gguf, cache):
    """The cached calibration is that of the folded weights, and describes the folding; so does a loaded one."""
    plain, _ = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS, method="absmax")
    assert plain.folding == Folding()
    for options in ({"equalisation": 0.5}, {"is_rotated": True}, {"equalisation": 0.5, "is_rotated": True}):
        made, path = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS, method="absmax", **options)
        assert {name: getattr(made, name) for name in options} == options
        assert made.folding.has_rotation == made.is_rotated
        assert bool(made.folding.rows) == (made.equalisation is not None)
        assert same(Calibration.load(path), made)
        again = calibrate(planned_gguf.plan, folded(planned_gguf, made), IDS, model="toy", method="absmax")
        assert made.peaks == again.peaks != plain.peaks
        # The logits are still those of the float decoder.
        assert made.peaks["lm_head.output"] == pytest.approx(plain.peaks["lm_head.output"], rel=1e-4)


def test_equalised_calibration_starts_from_the_plain_one_in_the_cache(planned_gguf, cache, monkeypatch):
    cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    runs = []

    def count(*arguments, **options):
        runs.append(arguments)
        return calibrate(*arguments, **options)

    monkeypatch.setattr(calibration_module, "calibrate", count)
    cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS, equalisation=0.5)
    assert len(runs) == 1


def test_calibration_of_another_version_is_not_used(planned_gguf, cache, monkeypatch):
    """Its values may have other names."""
    _, path = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    monkeypatch.setattr("chunkrt.engine_directory.content.__version__", "9.9")
    assert cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)[1] != path


def test_damaged_cache_is_rebuilt(planned_gguf, cache, caplog):
    made, path = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    path.write_bytes(path.read_bytes()[:-30])
    found, _ = cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    assert same(found, made)
    assert same(Calibration.load(path), made)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert path.name in record.getMessage()


def test_two_at_once(planned_gguf, cache):
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(cached_calibration, planned_gguf, GGUF, model="toy", token_ids=IDS) for _ in range(2)]
    (first, path), (second, _) = (future.result() for future in both)
    assert same(first, second)
    assert list(cache.iterdir()) == [path]


def test_interruption_leaves_no_files(planned_gguf, cache, monkeypatch):
    def interrupt(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS, progress=interrupt)
    assert not cache.exists()

    def interrupt_writing(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupt_writing)
    with pytest.raises(KeyboardInterrupt):
        cached_calibration(planned_gguf, GGUF, model="toy", token_ids=IDS)
    assert not any(cache.iterdir())


def test_plain_text_is_tokenised_unchanged(planned_gguf):
    expected = Tokenizer.from_source(planned_gguf.source).encode(TEXT, add_special=True, parse_special=False)
    assert calibration_tokens(planned_gguf, TEXT, None).tolist() == expected
    assert calibration_tokens(planned_gguf, TEXT, 4).tolist() == expected[:4]


def chatting(planned, template):
    metadata = {**planned.source.metadata, "tokenizer.chat_template": template}
    return SimpleNamespace(source=SimpleNamespace(path=GGUF, metadata=metadata, config=planned.source.config))


def test_chat_model_gets_a_conversation(planned_gguf):
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    first, second, third = TEXT.split("\n\n")
    turns = f"u:{first};a:{second};u:{third};"
    expected = Tokenizer.from_source(planned_gguf.source).encode(turns, add_special=True, parse_special=True)
    assert calibration_tokens(chatting(planned_gguf, template), TEXT, None).tolist() == expected


def test_failing_template_is_reported_and_omitted(planned_gguf, caplog):
    planned = chatting(planned_gguf, "{{ raise_exception('no') }}")
    assert (calibration_tokens(planned, TEXT, None) == calibration_tokens(planned_gguf, TEXT, None)).all()
    assert "calibrating on plain text" in caplog.text


def test_built_in_text(planned_gguf):
    text = shipped_text()
    assert 10_000 <= len(text.encode()) <= 14_000
    assert calibration_tokens(planned_gguf, text, None).size == DEFAULT_NUM_TOKENS


@pytest.mark.skipif(REAL_MODEL is None, reason=f"{REAL_NAME} is not here: chunkrt pull {REAL_NAME}")
def test_built_in_text_is_long_enough_for_a_real_vocabulary():
    source = open_checkpoint(REAL_MODEL)
    assert calibration_tokens(SimpleNamespace(source=source), shipped_text(), None).size == DEFAULT_NUM_TOKENS
    plain = Tokenizer.from_source(source).encode(shipped_text(), add_special=True, parse_special=False)
    assert len(plain) >= DEFAULT_NUM_TOKENS


@pytest.mark.parametrize("text", ["", " \n\n\t\n"])
def test_empty_text(planned_gguf, text):
    with pytest.raises(ConfigError, match="the calibration text is empty"):
        calibration_tokens(planned_gguf, text, None)


def test_too_few_tokens(planned_gguf):
    with pytest.raises(ConfigError, match=r"has \d+ tokens, fewer than the requested 500"):
        calibration_tokens(planned_gguf, TEXT, 500)
    with pytest.raises(ConfigError, match="is 0, expected at least 1"):
        calibration_tokens(planned_gguf, TEXT, 0)


def test_checkpoint_without_tokenizer(planned):
    with pytest.raises(ModelError, match="has no tokenizer"):
        calibration_tokens(planned, TEXT, None)
