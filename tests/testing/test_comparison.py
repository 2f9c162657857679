"""Comparison of decoders with values that Transformers computed; `make_expected` wrote tests/data/*.values.npz."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fixture_checkpoints import checkpoint, expected_logits, input_ids
from safetensors.numpy import load_file, save_file

from chunkrt.cli import cli
from chunkrt.compile.compiler import prepare_checkpoint
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import Recipe, find_scheme
from chunkrt.testing import ComparisonError, check_family
from chunkrt.testing.comparison import Comparison, Expected, ModuleValues, compare_decoder

DATA = Path(__file__).parent.parent / "data"
LLAMA, GEMMA = "llama_gqa", "gemma3_window_5"

Weights = dict[str, np.ndarray]


def values_of(name: str) -> Path:
    return DATA / f"{name}.values.npz"


def changed(name: str, folder: Path, config: Mapping[str, Any], change: Callable[[Weights], None]) -> Path:
    """Copy a fixture to a folder, with other keys in its config, and with changed weights."""
    shutil.copytree(checkpoint(name), folder)
    settings = json.loads((folder / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps(settings))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({key: np.ascontiguousarray(array) for key, array in weights.items()}, folder / "model.safetensors")
    return folder


def compared(folder: Path, name: str, *, scheme: str = "float", **options: Any) -> Comparison:
    prepared = prepare_checkpoint(folder, Recipe(scheme=find_scheme(scheme)), {}, model=folder.name)
    return compare_decoder(prepared, Expected.load(values_of(name)), **options)


def unchanged(weights: Weights) -> None:
    pass


def transposed(key: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({key: weights[key].T.copy()})


def exchanged(one: str, other: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({one: weights[other], other: weights[one]})


def scaled(key: str, factor: float) -> Callable[[Weights], None]:
    return lambda weights: weights.update({key: weights[key] * np.float32(factor)})


def heads_exchanged(weights: Weights) -> None:
    key = "model.layers.2.self_attn.k_proj.weight"
    weights[key] = np.roll(weights[key], len(weights[key]) // 2, axis=0)


LAYER = "model.layers.1"
MISTAKES: list[tuple[str, dict[str, Any], Callable[[Weights], None], str]] = [
    (LLAMA, {"rms_norm_eps": 1e-6}, unchanged, "model.layers.0.input_layernorm.output"),
    (LLAMA, {"rope_theta": 20000.0}, unchanged, "model.layers.0.self_attn.attention"),
    (LLAMA, {"hidden_act": "gelu_pytorch_tanh"}, unchanged, "model.layers.0.mlp.gated"),
    (LLAMA, {}, transposed(f"{LAYER}.self_attn.q_proj.weight"), f"{LAYER}.self_attn.qkv_proj.output"),
    (LLAMA, {}, transposed(f"{LAYER}.self_attn.o_proj.weight"), f"{LAYER}.self_attn.o_proj.output"),
    (
        LLAMA,
        {},
        exchanged(f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.v_proj.weight"),
        f"{LAYER}.self_attn.attention",
    ),
    (
        LLAMA,
        {},
        exchanged(f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"),
        f"{LAYER}.mlp.gated",
    ),
    (LLAMA, {}, heads_exchanged, "model.layers.2.self_attn.attention"),
    (LLAMA, {}, scaled(f"{LAYER}.mlp.down_proj.weight", 0.5), f"{LAYER}.output"),
    (LLAMA, {}, scaled(f"{LAYER}.post_attention_layernorm.weight", 1.01), f"{LAYER}.post_attention_layernorm.output"),
    (LLAMA, {}, scaled("model.norm.weight", 2.0), "model.norm.output"),
    (LLAMA, {}, scaled("model.embed_tokens.weight", 3.0), "model.embed_tokens.output"),
    (
        LLAMA,
        {},
        exchanged("model.layers.1.input_layernorm.weight", "model.layers.2.input_layernorm.weight"),
        "model.layers.1.input_layernorm.output",
    ),
    (GEMMA, {"query_pre_attn_scalar": 16}, unchanged, "model.layers.0.self_attn.attention"),
    (GEMMA, {"rope_local_base_freq": 1e6}, unchanged, "model.layers.0.self_attn.attention"),
    (GEMMA, {"rope_theta": 1e4}, unchanged, "model.layers.5.self_attn.attention"),
    (GEMMA, {"sliding_window": 6}, unchanged, "model.layers.0.self_attn.attention"),
    (GEMMA, {"hidden_activation": "silu"}, unchanged, "model.layers.0.mlp.gated"),
    (GEMMA, {"rms_norm_eps": 1e-5}, unchanged, "model.layers.0.input_layernorm.output"),
]


@pytest.mark.parametrize(("name", "config", "change", "place"), MISTAKES)
def test_comparison_finds_a_mistake_where_it_is(
    name: str, config: dict[str, Any], change: Callable[[Weights], None], place: str, tmp_path: Path
) -> None:
    found = compared(changed(name, tmp_path / "model", config, change), name)
    assert found.first_difference is not None
    assert found.first_difference.value == place


@pytest.mark.parametrize("chunk_length", [None, 1, 5, 12])
@pytest.mark.parametrize("name", [LLAMA, GEMMA])
def test_comparison_of_a_right_decoder_finds_no_difference(name: str, chunk_length: int | None) -> None:
    found = compared(checkpoint(name), name, chunk_length=chunk_length)
    assert found.first_difference is None
    assert not found.unmatched
    assert found.logits_error < 1e-5
    assert {value.layer for value in found.values} == {None, *range(6 if name == GEMMA else 3)}


@pytest.mark.parametrize("name", ["opt_norms_behind", "falcon_mamba", "glm4_moe"])
def test_comparison_takes_positions_constants_and_stacked_experts(name: str) -> None:
    """OPT's table gives a sum here, a norm of Falcon Mamba has no weight, and Transformers stacks experts."""
    assert compared(checkpoint(name), name, chunk_length=5).is_equal


def test_comparison_under_a_scheme_shows_the_errors_of_linears() -> None:
    found = compared(checkpoint(LLAMA), LLAMA, scheme="w8a8-dynamic")
    linears = [value.error for value in found.values if value.operator == "MatMul"]
    assert min(linears) > 1e-3
    assert max(linears) < 0.05
    assert max(value.error for value in found.values if value.operator == "RMSNormalization") < 1e-5


def test_dump_contains_the_compared_values_of_both_runs(tmp_path: Path) -> None:
    compared(checkpoint(LLAMA), LLAMA, dump=tmp_path)
    expected = Expected.load(values_of(LLAMA)).modules[f"{LAYER}.mlp.down_proj"].output
    for run in ("exact", "accumulated", "transformers"):
        np.testing.assert_allclose(np.load(tmp_path / run / f"{LAYER}.mlp.down_proj.output.npy"), expected, atol=1e-5)


def test_family_check_names_the_first_difference(tmp_path: Path) -> None:
    check_family(checkpoint(LLAMA), values_of(LLAMA))
    wrong = changed(LLAMA, tmp_path / "model", {"rope_theta": 5e5}, unchanged)
    with pytest.raises(ComparisonError, match=r"in layer 0: model\.layers\.0\.self_attn\.attention \(CachedAttention"):
        check_family(wrong, values_of(LLAMA))


def test_values_of_another_model_are_rejected() -> None:
    with pytest.raises(ConfigError, match="this is another model"):
        compared(checkpoint(GEMMA), LLAMA)
    with pytest.raises(ConfigError, match="cannot read expected values"):
        Expected.load(Path(checkpoint(LLAMA)) / "config.json")


def test_logits_that_differ_alone_are_a_difference(tmp_path: Path) -> None:
    expected = Expected.load(values_of(LLAMA))
    replace(expected, logits=2 * expected.logits).save(tmp_path / "twice.npz")
    found = CliRunner().invoke(cli, ["compare", str(checkpoint(LLAMA)), "--against", str(tmp_path / "twice.npz")])
    assert found.exit_code == 3
    assert "the logits differ" in found.output


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive"])
def test_damaged_expected_values_are_one_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "expected.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read expected values"):
        Expected.load(tmp_path / "expected.npz")


def test_expected_values_of_another_form_are_rejected(tmp_path: Path) -> None:
    expected = Expected.load(values_of(LLAMA))
    replace(expected, token_ids=expected.token_ids[:, None]).save(tmp_path / "odd.npz")
    with pytest.raises(ConfigError, match="token ids are not a list"):
        Expected.load(tmp_path / "odd.npz")
    outside = replace(expected, token_ids=expected.token_ids + 10_000)
    prepared = prepare_checkpoint(checkpoint(LLAMA), Recipe(scheme=find_scheme("float")), {}, model=LLAMA)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        compare_decoder(prepared, outside)


def test_compare_command_reports_the_first_difference(tmp_path: Path) -> None:
    right = CliRunner().invoke(cli, ["compare", str(checkpoint(LLAMA)), "--against", str(values_of(LLAMA))])
    assert right.exit_code == 0, right.output
    assert "all values are equal" in right.output
    wrong = changed(LLAMA, tmp_path / "model", {"rms_norm_eps": 1e-3}, unchanged)
    found = CliRunner().invoke(cli, ["compare", str(wrong), "--against", str(values_of(LLAMA)), "--json"])
    assert found.exit_code == 3
    assert json.loads(found.output)["first_difference"]["value"] == "model.layers.0.input_layernorm.output"


def test_compare_command_adds_an_adapter(tmp_path: Path) -> None:
    """The expected logits are those of PEFT."""
    adapter = DATA / "adapters" / "llama_biased"
    ids, logits = np.array(input_ids("llama_biased")), np.load(adapter / "expected.npz")["logits"]
    Expected(token_ids=ids, logits=logits, modules={}).save(tmp_path / "values.npz")
    command = ["compare", str(checkpoint("llama_biased")), "--against", str(tmp_path / "values.npz")]
    assert CliRunner().invoke(cli, [*command, "--adapter", str(adapter)]).exit_code == 0
    assert CliRunner().invoke(cli, [*command, "--adapter", f"{adapter}.gguf"]).exit_code == 0
    assert CliRunner().invoke(cli, command).exit_code == 3


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_compare_without_torch_names_the_extra() -> None:
    found = CliRunner().invoke(cli, ["compare", str(checkpoint(LLAMA))])
    assert isinstance(found.exception, ConfigError)
    assert 'pip install "chunkrt[compare]"' in str(found.exception)


def test_factor_of_a_tied_head_is_folded():
    """Granite's logits are those of its head, which shares the embedding's table, over logits_scaling (0.5)."""
    logits = expected_logits("granite")
    head = ModuleValues(input=None, output=logits * np.float32(0.5))
    expected = Expected(token_ids=np.array(input_ids("granite")), logits=logits, modules={"lm_head": head})
    prepared = prepare_checkpoint(checkpoint("granite"), Recipe(scheme=find_scheme("float")), {}, model="granite")
    (found,) = compare_decoder(prepared, expected).values
    assert (found.value, found.is_equal, found.folded) == ("lm_head.output", True, "2 times")
