"""Settings files: their effect, their precedence, and their errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixture_checkpoints import checkpoint
from one_line import expect_one_line

import chunkrt
from chunkrt.engine.settings import read_settings, settings_text
from chunkrt.engine_directory.manifest import read_manifest, read_plan
from chunkrt.errors import ConfigError

GGUF = str(checkpoint("llama_biased_gguf"))
DOWN_ON_CPU = {"model.layers.*.mlp.down_proj": "cpu"}
PLACED = '\n[placement]\n"model.layers.*.mlp.down_proj" = "cpu"\n'


@pytest.fixture
def write(tmp_path: Path):
    """A function that writes a settings file."""

    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def bench(command, *options: object) -> dict[str, object]:
    finished = command("bench", GGUF, "-p", "20", "-n", "0", "-r", "1", "-o", "json", *options)
    assert finished.status == 0, finished.err
    [row] = json.loads(finished.out)
    return row


def test_file_changes_the_engine_and_the_command_line_overrides_it(command, write) -> None:
    path = write('chunk_length = 8\npolicy = "in_order"\nthreads = 2\nscheme = "float"\nnpu = "reference"\n')
    told = {"backend": "reference", "scheme": "float", "chunk": 8, "policy": "in_order", "threads": 2}
    assert bench(command, "--settings", path).items() >= told.items()
    row = bench(command, "--settings", path, "--chunk", "16", "--policy", "look_ahead", "--npu", "onnxrt")
    changed = {"backend": "onnxrt", "chunk": 16, "policy": "look_ahead"}
    assert row.items() >= (told | changed).items()


def test_settings_without_a_flag_come_from_the_file(write) -> None:
    path = write('chunk_length = 8\nchunks_in_flight = 2\ncache_dtype = "float32"\n[htp]\nvtcm_mb = 4\n')
    settings = read_settings(path)
    with chunkrt.load(GGUF, **settings) as engine:
        assert (engine.chunk_length, engine.options.chunks_in_flight, engine.options.htp.vtcm_mb) == (8, 2, 4)
        assert engine.cache_dtype == "float32"


@pytest.mark.parametrize("name", ["run", "chat"])
def test_generation_accepts_a_settings_file(command, write, name: str) -> None:
    path = write("context_length = 4\nchunk_length = 2\n")
    prompt = ["-p", "hello " * 10, "--raw"] if name == "run" else []
    finished = command(name, GGUF, *prompt, "--settings", path, stdin="hello " * 10 + "\n")
    assert "context of 4" in finished.err + finished.out or "no chat template" in finished.err


def test_placement_table_makes_another_engine_folder(write) -> None:
    natural = chunkrt.load(GGUF)
    placed = chunkrt.load(GGUF, **read_settings(write(PLACED)))
    same = chunkrt.load(GGUF, placement=DOWN_ON_CPU)
    with natural, placed, same:
        assert placed.folder == same.folder != natural.folder
        assert len(placed.plan.subgraphs) > len(natural.plan.subgraphs)
        assert read_manifest(placed.folder).placement == DOWN_ON_CPU


def test_mapping_and_file_of_the_same_lines_are_one_placement(tmp_path: Path) -> None:
    path = tmp_path / "placement.toml"
    path.write_text('"model.layers.*.mlp.down_proj" = "cpu"\n')
    with chunkrt.load(GGUF, placement=path) as from_file, chunkrt.load(GGUF, placement=DOWN_ON_CPU) as from_mapping:
        assert from_file.folder == from_mapping.folder


def test_list_of_layers_in_a_file_is_the_placement_of_the_flag(command, write) -> None:
    layers = {"model.layers.*": "cpu", "model.layers.1": "npu"}
    path = write('scheme = "w8a16"\nplacement = "layers=1"\n')
    assert read_settings(path)["placement"] == layers
    plans = [
        command("plan", GGUF, "--json", *options)
        for options in (("--settings", path), ("--scheme", "w8a16", "--place", "layers=1"), ("--scheme", "w8a16"))
    ]
    assert all(plan.status == 0 for plan in plans)
    assert plans[0].out == plans[1].out != plans[2].out


def test_compile_accepts_a_settings_file_and_its_output_runs_with_it(command, write, tmp_path: Path) -> None:
    path = write('scheme = "w8a16"\nchunk_length = 8\npolicy = "in_order"\nchunks_in_flight = 3\n' + PLACED)
    folder = tmp_path / "engine"
    finished = command("compile", GGUF, "-o", folder, "--settings", path)
    assert finished.status == 0, finished.err
    assert read_manifest(folder).scheme.name == "w8a16"
    assert any(s.device == "cpu" and any("down_proj" in w for w in s.weights) for s in read_plan(folder).subgraphs)
    with chunkrt.load(folder, **read_settings(path)) as engine:
        assert (engine.chunk_length, engine.options.policy) == (8, "in_order")
    with pytest.raises(ConfigError, match="its placement is fixed; pass the checkpoint"):
        chunkrt.load(folder, placement={"lm_head": "npu"})


def test_command_line_overrides_settings_in_compile(command, write, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    command("compile", GGUF, "-o", folder, "--settings", write('scheme = "float"'), "--scheme", "w8a8-dynamic")
    assert read_manifest(folder).scheme.name == "w8a8-dynamic"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk = 32", "unknown key 'chunk'; did you mean 'chunk_length'?"),
        ("chunks_inflight = 4", "unknown key 'chunks_inflight'; did you mean 'chunks_in_flight'?"),
        ("[engine]\nthreads = 2", "unknown key 'engine'"),
        ('threads = "32"', "threads is '32', expected a whole number"),
        ("threads = 1.5", "threads is 1.5, expected a whole number"),
        ("threads = true", "threads is True, expected a whole number"),
        ("threads = 0", "threads is 0, expected at least 1"),
        ("policy = 3", "policy is 3, expected a name"),
        ('policy = "in_oder"', "did you mean 'in_order'?"),
        ('scheme = "w8a17"', "unknown scheme 'w8a17'"),
        ('soc = "SM8651"', "SM8651"),
        ('cache_dtype = "float8"', "unknown type of the cache 'float8'"),
        ('cache_dtype = "int8"\nnpu = "reference"', "npu='reference' does not support cache_dtype='int8'"),
        ('attention_math = "float16"', "unknown arithmetic of attention 'float16'"),
        ('attention_math = "bfloat16"\nnpu = "onnxrt"', "npu='onnxrt' does not support attention_math='bfloat16'"),
        ('placement = "file.toml"', "placement is 'file.toml', expected a table, [placement]"),
        ('placement = "layers=a"', "the placement is 'layers=a', expected numbers of layers"),
        ('[placement]\nlm_head = "gpu"', "'lm_head' is placed on 'gpu', expected 'npu' or 'cpu'"),
        ('[placement]\nmodel.norm = "cpu"', "write the pattern in quotes"),
        ("[htp]\nvtcm = 4", "unknown NPU setting 'vtcm'"),
        ("[htp]\nvtcm_mb = 'all'", "vtcm_mb is 'all', expected a whole number"),
        ("calibration = 3", "calibration is 3, expected the name of a file"),
        ("device = 3", "device is 3, expected a name or a file"),
        ("chunk_length", "cannot read the settings file"),
    ],
)
def test_invalid_file_prints_one_line_that_names_it(command, write, text: str, message: str) -> None:
    finished = command("run", GGUF, "-p", "hello", "--settings", write(text))
    expect_one_line(finished, message, 1)
    assert "settings.toml" in finished.err


def test_missing_settings_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings file .*nowhere.toml"):
        read_settings(tmp_path / "nowhere.toml")


def test_placement_without_a_matching_module_is_an_error(command, write) -> None:
    finished = command("run", GGUF, "-p", "hello", "--settings", write('[placement]\nlm_haed = "npu"'))
    assert finished.status == 1
    assert "did you mean 'lm_head'?" in finished.err


def test_calibration_is_relative_to_the_file(write, tmp_path: Path) -> None:
    assert read_settings(write('calibration = "grids.safetensors"'))["calibration"] == tmp_path / "grids.safetensors"


def test_written_settings_are_read_again(write) -> None:
    settings = {"scheme": "w8a16", "chunk_length": 64, "placement": {"model.layers.*.mlp": "cpu", "lm_head": "npu"}}
    text = settings_text(settings, ["Two lines\nbecome one."])
    assert text.splitlines()[0] == "# Two lines become one."
    assert read_settings(write(text)) == settings
