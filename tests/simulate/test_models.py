"""Models without weights have the plans of their checkpoints; attention on the NPU, shadows and placements are
simulated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from fixture_checkpoints import NAMES, checkpoint
from free_device import free_device
from one_line import expect_one_line
from small_shape import SMALL_SHAPE

from chunkrt.checkpoints.config_only import ConfigSource
from chunkrt.cli import cli
from chunkrt.compile.compiler import plan_checkpoint
from chunkrt.engine.npu_attention import near_plans
from chunkrt.engine.options import EngineOptions
from chunkrt.errors import ModelError
from chunkrt.graph.plan import Plan
from chunkrt.quant.scheme import SCHEMES
from chunkrt.runtime.trace.file import read_trace
from chunkrt.simulate import DeviceProfile, simulate

FOLDERS = [name for name in NAMES if checkpoint(name).is_dir()]
OPTIONS = {"chunk_length": 32, "policy": "in_order", "scheme": "w8a16"}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.err
    return result.stdout


@pytest.mark.parametrize("name", FOLDERS)
def test_config_without_weights_has_the_plan_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    if not (checkpoint(name) / "config.json").exists():
        pytest.skip("an ONNX decoder has no config")
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    planned = json.loads(run("plan", tmp_path, "--scheme", "float", "--npu", "reference", "--json"))["plan"]
    assert planned == json.loads(plan_checkpoint(checkpoint(name), {}).plan.to_json())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "mixed"], "config.json has no weights, which the search for mixed layers needs; name the layers"),
        (["--scheme", "w8a8", "--shadow", "auto"], "has no weights, which the search for shadow layers needs"),
        (["--scheme", "w8a8", "--shadow", "*.down_prj.weight"], "unknown 8-bit linear layer '*.down_prj.weight'"),
        (["--attention", "npu", "--scheme", "float"], "the NPU does not run the scheme float; choose a static one"),
        (["--calibration", "none.npz"], "--calibration has no effect without --scheme mixed or --shadow auto; omit it"),
        (["-p", "16,32", "--trace", "x.json"], "--trace needs one prompt length, one chunk length and one policy"),
    ],
)
def test_wrong_options_of_a_config_print_one_line(arguments: list[str], message: str, command, tmp_path: Path) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    expect_one_line(
        command("simulate", tmp_path / "config.json", "--device", "sd8gen3", "--chunk", "8", *arguments), message, 1
    )


def test_config_without_a_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ModelError, match="has no model_type; is it a Transformers model"):
        ConfigSource(tmp_path / "config.json")


def near(plan: Plan, window: str) -> dict[int, Plan]:
    options = EngineOptions(npu="qnn", attention="npu", npu_window=window)
    return {each.reach: each.plan for each in near_plans(plan, {}, options, plan.context_length)}


def test_chunks_within_reach_attend_on_the_npu_and_later_chunks_on_the_cpu(plan: Plan, device: DeviceProfile) -> None:
    plans = near(plan, "64,128")
    found = simulate(plan, device, prompt_length=230, near=plans, **OPTIONS)
    assert [(record.position, record.num_tokens) for record in found.records] == [
        *((position, 32) for position in (0, 32, 64, 96, 128)),
        (160, 70),
    ]
    names = [[stage.name for stage in record.pipeline.stages] for record in found.records]
    of = {reach: [subgraph.name for subgraph in each.subgraphs] for reach, each in plans.items()}
    assert names == [of[64]] * 3 + [of[128]] * 2 + [[subgraph.name for subgraph in plan.subgraphs]]
    for before, after in zip(found.records, found.records[1:], strict=False):
        assert before.end_ns == after.start_ns <= min(event.start_ns for event in after.events)
    assert found.makespan_ms * 1e6 == found.records[-1].end_ns


def test_chunk_with_attention_on_the_npu_takes_its_graphs_and_the_cpus_tasks_in_turn(
    plan: Plan, device: DeviceProfile
) -> None:
    (whole,) = near(plan, "512").values()
    found = simulate(plan, device, prompt_length=64, near={512: whole}, **OPTIONS)
    for record in found.records:
        for before, after in zip(record.events, record.events[1:], strict=False):
            assert before.end_ns == after.start_ns
    busy_ns = sum(event.end_ns - event.start_ns for record in found.records for event in record.events)
    assert found.makespan_ms * 1e6 == pytest.approx(busy_ns)
    assert found.npu_busy + found.cpu_busy == pytest.approx(1.0)
    assert found.overlap == 0.0


def test_shadow_costs_its_input_and_the_kept_rows_of_the_weight(device: DeviceProfile) -> None:
    """Down projections have 96 inputs, so 3 rows are kept for the CPU (one of 32)."""
    bare = free_device(device, cpu={"linear_float": {"fixed_us": 7.0, "gops": 1.0}})
    scheme = replace(SCHEMES["w8a8"], shadowed=("*.down_proj.weight",))
    shadowed = SMALL_SHAPE.plan(is_shadowed=scheme.is_shadowed)
    options = {**OPTIONS, "scheme": scheme}
    without = simulate(SMALL_SHAPE.plan(), bare, prompt_length=32, **options)
    found = simulate(shadowed, bare, prompt_length=32, **options)
    us = 2 * (7.0 + 32 * (96 + 2 * 3 * 64) / 1000)
    assert found.makespan_ms - without.makespan_ms == pytest.approx(us / 1000, rel=1e-4)


def test_command_simulates_shadows_placements_and_attention_of_a_settings_file(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(
        'soc = "SM8650"\nscheme = "w8a8"\nshadow = "*.layers.0.*down_proj.weight"\nchunk_length = 64\n'
        '[placement]\n"model.layers.1.mlp" = "cpu"\n'
    )
    trace = tmp_path / "trace.json"
    out = run("simulate", "gemma-2b", "-p", "200", "--settings", settings, "--trace", trace, "--json")
    (row,) = json.loads(out)
    assert (row["chunk_length"], row["scheme"], row["device"]) == (64, "w8a8", "Snapdragon 8 Gen 3")
    (record,) = read_trace(trace)
    stages = [stage.name for stage in record.pipeline.stages]
    assert "shadow.0" in stages
    assert "shadow.1" not in stages
    (alone,) = json.loads(run("simulate", "gemma-2b", "--device", "sd8gen3", "-p", "200", "--chunk", "64", "--json"))
    assert row["time_to_first_token_ms"] > alone["time_to_first_token_ms"]
    on_npu = run("simulate", "gemma-2b", "--device", "sd8gen3", "-p", "611", "--attention", "npu", "--json")
    assert json.loads(on_npu)[0]["prompt_length"] == 611


def test_fit_takes_a_config_and_the_layers_with_shadows(tmp_path: Path) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    common = ("fit", tmp_path, "--soc", "SM8650", "--scheme", "w8a8", "--json")
    plain, shadowed = (json.loads(run(*common, *more)) for more in ((), ("--shadow", "all")))
    assert shadowed["cpu_weight_bytes"] > plain["cpu_weight_bytes"]
