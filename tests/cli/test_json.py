"""Tests that docs/json.md has a schema for every --json, and that outputs are valid under it."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from fixture_checkpoints import checkpoint

from chunkrt.cli import COMMANDS, find_command

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
GGUF = str(checkpoint("llama_biased_gguf"))
VALUES = Path(__file__).parents[1] / "data" / "llama_gqa.values.npz"
SCHEMAS = {
    name: json.loads(text)
    for name, text in re.findall(r"^## `(.+?)`\n.*?```json\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}
WAYS = {
    "run": ([GGUF, "-p", "hello", "-n", 2], [GGUF, "-p", "hello", "-n", 1]),
    "run --prompts": ([GGUF, "--prompts", "{prompts}", "-n", 2],),
    "bench": ([GGUF, "-p", 8, "-n", 2, "-r", 1],),
    "bench --parallel": ([GGUF, "-p", 8, "-n", 2, "-r", 1, "--parallel", 2],),
    "trace": (["{trace}"],),
    "compare": ([str(checkpoint("llama_gqa")), "--against", str(VALUES)],),
    "support": ([GGUF], [str(checkpoint("llama_mha"))]),
    "plan": ([GGUF], [GGUF, "--scheme", "w8a16"]),
    "ops": ([GGUF],),
    "calibrate": ([GGUF, "--tokens", 64], [GGUF, "--tokens", 128, "--scheme", "w8a8", "--shadow", "auto"]),
    "calibrate --merge": (["--merge", "{folder}/64.npz", "{folder}/32.npz", "-o", "{folder}/merged.npz"],),
    "eval": ([GGUF, "--text", "{text}", "--window", 16, "--windows", 2, "--base", "w8a8-dynamic"],),
    "fit": ([GGUF, "--soc", "8gen3"], [GGUF, "--soc", "8gen3", "--ram", "0.0001"]),
    "simulate": (["qwen1.5-1.8b", "--device", "8gen3", "-p", 32, "--chunk", 32],),
    "simulate --arrivals": (
        [
            *("qwen1.5-1.8b", "--device", "8gen3", "--chunk", 32, "--arrivals", "poisson:1"),
            *("--prompt", 32, "--generate", 4, "--requests", 4),
        ],
    ),
    "tune": ([GGUF, "--device", "8gen3", "-o", "{folder}/tuned.toml", "-p", 16, "--chunk", 32],),
    "experiment": (["{folder}/grid.toml"],),
    "profile": ([GGUF, "-o", "{folder}/profile.toml", "-r", 1, "--budgets", 1, "--chunk", 8],),
    "compile": ([GGUF, "-o", "{folder}/engine"],),
    "export": ([GGUF, "-o", "{folder}/decoder.onnx", "--window", 8, "--context", 32],),
    "models": ([],),
    "models --remove": (["--remove", GGUF],),
    "pull": (["mine"],),
    "doctor": ([],),
}


@pytest.fixture
def places(tmp_path, command, monkeypatch):
    """Create input files, and a catalogue with a downloaded model."""
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    (tmp_path / "mine.toml").write_text(
        'family = "llama"\nscheme = "float"\ncontext_length = 64\nlicence = "mit"\n'
        f"[source]\nkind = 'path'\npath = '{GGUF}'\n"
    )
    (tmp_path / "prompts.jsonl").write_text('"hello"\n{"prompt": "more", "id": "a"}\n')
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten " * 20)
    (tmp_path / "grid.toml").write_text(
        'model = "gemma-2b"\ndevices = ["sd8gen3"]\nschemes = ["w8a16"]\nprompt_lengths = [32]\n'
        'chunk_lengths = [32]\npolicies = ["in_order"]\nplacements = [{"model.norm" = "cpu"}]\n'
    )
    names = {"folder": tmp_path, "prompts": tmp_path / "prompts.jsonl", "text": tmp_path / "text.txt"}
    return names | {"trace": tmp_path / "trace.json"}


def printed(command, name, places):
    """Yield the values that a command prints, for each kind of output."""
    what, _, option = name.partition(" ")
    if what == "trace":
        assert command("run", GGUF, "-p", "hello", "-n", 2, "--trace", places["trace"]).status == 0
    if option == "--remove":
        assert command("run", GGUF, "-p", "hello", "-n", 1).status == 0
    if option == "--merge":
        for num_tokens in (64, 32):
            path = places["folder"] / f"{num_tokens}.npz"
            assert command("calibrate", GGUF, "--tokens", num_tokens, "-o", path).status == 0
    for arguments in WAYS[name]:
        finished = command(what, *(str(a).format(**places) for a in arguments), "--json")
        assert finished.status in (0, 3), finished.err
        texts = finished.out.splitlines() if option == "--prompts" else [finished.out]
        yield from map(json.loads, texts)


@pytest.mark.parametrize("name", sorted(WAYS))
def test_json_output_is_valid_under_its_schema(command, name, places, tmp_path, monkeypatch):
    if name == "models --remove":  # exclude engines of other tests
        monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    for value in printed(command, name, places):
        jsonschema.validate(value, SCHEMAS[name], cls=jsonschema.Draft202012Validator)


def test_every_command_with_json_has_a_schema():
    with_json = {name for name in COMMANDS for p in find_command(name).params if "--json" in p.opts}
    assert {name.partition(" ")[0] for name in SCHEMAS} == with_json
    assert set(SCHEMAS) == set(WAYS)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("additionalProperties", schema.get("items", {}).get("additionalProperties")) is False
