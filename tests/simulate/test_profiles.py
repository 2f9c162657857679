"""Device profiles and shapes: those that come with chunkrt are complete and have sources, and bad ones are refused."""

from __future__ import annotations

import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from chunkrt.backends.qnn.socs import SOCS
from chunkrt.engine_directory.figures import attention_figures, subgraph_figures
from chunkrt.errors import ConfigError
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import find_scheme
from chunkrt.simulate import DEVICES, DeviceProfile, find_device, find_shape, read_profile, shapes
from chunkrt.simulate import profile as profile_module
from chunkrt.simulate.measured import MeasuredProfile, SubgraphCost, ThreadsCost, write_measured
from chunkrt.simulate.profile import OPERATORS

FOLDER = Path(profile_module.__file__).parent / "devices"
SHIPPED = {"sd8gen2": "SM8550", "sd8gen3": "SM8650", "sd8elite": "SM8750", "sdxelite": "SC8380XP"}


def shipped(name: str) -> DeviceProfile:
    profile = find_device(name)
    assert isinstance(profile, DeviceProfile)
    return profile


def parameters(value: Any, prefix: str = "") -> list[str]:
    """The dotted paths of all numbers in a profile."""
    if isinstance(value, float):
        return [prefix]
    if isinstance(value, dict):
        return [path for key, item in value.items() for path in parameters(item, f"{prefix}.{key}")]
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name != "sources"]
        return [path for n in names for path in parameters(getattr(value, n), f"{prefix}.{n}")]
    return []


@pytest.mark.parametrize(("name", "soc"), SHIPPED.items())
def test_profiles_include_four_snapdragons(name: str, soc: str) -> None:
    assert shipped(name).soc == soc
    assert soc in SOCS


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_has_a_source(name: str) -> None:
    profile = shipped(name)
    found = {path.removeprefix(".") for path in parameters(profile)}
    assert found == set(profile.sources)
    assert len(found) == 3 + 2 + 2 + 2 * (2 + 3 * len(OPERATORS))
    assert all(len(source.text) >= 10 for source in profile.sources.values())


@pytest.mark.parametrize("name", DEVICES)
def test_unpublished_numbers_are_marked_as_guesses(name: str) -> None:
    for path, source in shipped(name).sources.items():
        assert source.is_guess or "no figure published" not in source.text, path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[memory]\ngb_per_s",
            "[memory]\ngb_per_sec",
            "unknown key 'memory.gb_per_sec'; did you mean 'memory.gb_per_s'",
        ),
        ('soc = "SM8650"', 'soc = "SM8651"', "unknown SoC 'SM8651'; did you mean 'SM8650'"),
        ("[npu.operators.attention]", "[npu.operators.atention]", "did you mean 'attention'"),
        ("[cpu]\ntask_us = { value = 20", "[cpu]\ntask_us = { value = -20", "cpu.task_us is -20, expected a number"),
        ("[cpu]\ntask_us = { value = 20", "[cpu]\ntask_us = { valu = 20", "did you mean 'cpu.task_us.value'"),
        (
            "gops = { value = 10000",
            "gops = { value = 0",
            "npu.operators.linear_float.gops is 0, expected a number above 0",
        ),
        ("model_error = { value = 0.5", "model_error = { value = 1e6", "model_error is 1e+06, expected at most 3"),
        (
            'name = "Snapdragon 8 Gen 3"',
            'name = "a phone"\nmodes.slow.clock = { value = 0, source = "s" }\n'
            'modes.slow.bandwidth = { value = 1, source = "s" }\nmodes.slow.watts = { value = 1, source = "s" }',
            "modes.slow.clock is 0, expected a number above 0",
        ),
        ('name = "Snapdragon 8 Gen 3"', "name = 3", "name is 3, expected str"),
        ('name = "Snapdragon 8 Gen 3"', "", "the key 'name' is missing"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (FOLDER / "sd8gen3.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_profile(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_number_without_a_source_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "sd8gen3.toml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("source = ")]
    path = tmp_path / "wrong.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match="has no source"):
        read_profile(path)


def test_an_unknown_device_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sd8gen3'"):
        find_device("sd8gen")
    with pytest.raises(ConfigError, match="cannot read"):
        find_device("missing.toml")


def test_a_measured_profile_reads_back_as_it_was_written(tmp_path: Path) -> None:
    cost = SubgraphCost(subgraph="static.0", fixed_us=1.5, row_us=0.25, pair_us=0.0, speeds=(1.0, 0.625))
    token = SubgraphCost(subgraph="head", fixed_us=7.0, row_us=3.0, pair_us=0.125)
    budget = ThreadsCost(
        threads=2,
        prompt_us=9.0,
        task_us=0.5,
        step_us=20.0,
        token_us=4.0,
        subgraphs={"static.0": cost},
        decode={"head": token},
    )
    profile = MeasuredProfile(
        name='a "name"',
        model="m",
        scheme="float",
        chunk_length=32,
        has_npu=False,
        conditions="quiet",
        budgets={2: budget},
    )
    path = tmp_path / "measured.toml"
    for each in (profile, replace(profile, budgets={2: replace(budget, decode={})})):
        path.write_text(write_measured(each), encoding="utf-8")
        assert read_profile(path) == each
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert table["measured"]["threads"][0]["subgraphs"][0]["speeds"] == [1.0, 0.625]
    for key, message in {
        "row_us": r"did you mean 'measured\.threads\.decode\.row_us'",
        "step_us": r"did you mean 'measured\.threads\.step_us'",
    }.items():
        path.write_text(write_measured(profile).replace(key, f"x_{key}"), encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_profile(path)
    for value, message in {"0": "expected at least 1", "-32": "expected at least 1", "true": "expected int"}.items():
        path.write_text(write_measured(profile).replace("chunk_length = 32", f"chunk_length = {value}"))
        with pytest.raises(ConfigError, match=f"measured.chunk_length is .*, {message}"):
            read_profile(path)


PARAMETERS = {
    "qwen1.5-1.8b": 1.84e9,
    "qwen2.5-0.5b": 0.494e9,
    "gemma-2b": 2.51e9,
    "llama-2-7b": 6.74e9,
    "phi-2": 2.78e9,
    "mistral-7b": 7.24e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3-8b": 8.03e9,
    "llama-3.2-1b": 1.24e9,
    "llama-3.2-3b": 3.21e9,
    "qwen2-7b": 7.62e9,
    "qwen2.5-1.5b": 1.54e9,
    "qwen2.5-3b": 3.09e9,
    "qwen2.5-7b": 7.62e9,
    "deepseek-r1-distill-qwen-1.5b": 1.78e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9,
    "qwen3.5-0.8b": 0.752e9,
    "qwen3.5-2b": 1.88e9,
    "gemma-3-1b": 1.00e9,
    "phi-3.5-mini": 3.82e9,
    "phi-4-mini": 3.84e9,
    "falcon3-7b": 7.46e9,
    "granite-3.1-8b": 8.17e9,
    "granite-3.3-2b": 2.53e9,
    "mistral-7b-v0.3": 7.25e9,
    "baichuan2-7b": 7.51e9,
    "allam-7b": 7.00e9,
    "jais-6.7b": 6.77e9,
    "smollm2-135m": 0.1345e9,
    "smollm2-1.7b": 1.71e9,
    "smollm3-3b": 3.08e9,
    "internlm3-8b": 8.80e9,
    "lfm2.5-1.2b": 1.17e9,
}
"""Parameter counts by their authors; those of Qwen3.5 without vision and multi-token prediction."""


def num_parameters(plan: Plan) -> int:
    total = 0
    for name, tensor in plan.tensors.items():
        if tensor.kind == "weight" and "rope" not in name:
            size = 1
            for dimension in tensor.shape:
                size *= int(dimension)
            total += size
    return total


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    shape = find_shape(name)
    plan = shape.plan()
    tied = shape.vocab_size * shape.hidden_size if shape.tie_word_embeddings else 0
    total = num_parameters(plan)
    if tied and any(n.startswith("lm_head") for n in plan.tensors if plan.tensors[n].kind == "weight"):
        total -= tied
    assert total == pytest.approx(PARAMETERS[name], rel=0.01)
    assert shape.source


def test_shapes_are_complete_and_list_approximations() -> None:
    assert set(shapes()) == set(PARAMETERS)
    assert any("10240" in text for text in find_shape("phi-2").approximations)
    with pytest.raises(ConfigError, match="did you mean 'phi-2'"):
        find_shape("phi2")


def test_phi_keeps_the_operations_of_its_two_matrices() -> None:
    plan = find_shape("phi-2").plan()
    flops = sum(
        f.linear_flops for f in subgraph_figures(plan, find_scheme("w8a8"), chunk_length=1) if f.device == "npu"
    )
    assert flops == pytest.approx(32 * 2 * (4 * 2560**2 + 2 * 2560 * 10240), rel=1e-3)


def test_gemma_attends_with_one_head_of_keys() -> None:
    plan = find_shape("gemma-2b").plan()
    assert sum(t.num_bytes(P=1) for t in plan.state_tensors) == 18 * 2 * 256 * 4
    assert attention_figures(plan, chunk_length=1, prompt_length=1).unchunked_flops == 18 * 4 * 8 * 256


def test_the_partition_of_llm_npu_has_its_144_subgraphs() -> None:
    plan = find_shape("qwen1.5-1.8b").plan({"model.layers.*_layernorm": "cpu", "model.norm": "cpu"})
    inner = [s for s in plan.subgraphs if s.rows == "T" and s.name != "embedding"]
    attention = [s for s in inner if s.state]
    assert len(attention) == 24
    assert len(inner) - len(attention) in (120, 121)  # the embedding is fused with the first norm, or stays separate
