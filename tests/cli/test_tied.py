"""Tests of a config that ties the LM head although the checkpoint holds an untied head: commands use both."""

import json

import pytest
from random_folders import write_folder

import chunkrt

SIZES = {"attention_bias": False, "max_position_embeddings": 256}
NUM_PARAMETERS = 61 * 36 * 2 + 36 + 2 * (2 * 36 + 36 * 10 * (4 + 2 + 2) + 40 * 36 + 3 * 36 * 52)
"""Number of parameters: the table and the LM head, the last norm, and two layers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write the same tensors under a correct config and a stale one, and a checkpoint with a true tie."""
    root = tmp_path_factory.mktemp("tied")
    honest, stale = (write_folder(root / name / "model", **SIZES, tie_word_embeddings=False) for name in ("a", "b"))
    config = json.loads((stale / "config.json").read_text())
    (stale / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return honest, stale, write_folder(root / "c" / "model", **SIZES, tie_word_embeddings=True)


def test_num_parameters_of_a_stale_tie_counts_head_and_table(folders):
    found = []
    for folder in folders:
        with chunkrt.load(folder, npu="reference", scheme="float") as engine:
            found.append(engine.loaded.manifest.num_parameters)
    assert found == [NUM_PARAMETERS, NUM_PARAMETERS, NUM_PARAMETERS - 61 * 36]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--scheme", "float", "--npu", "reference"),
        ("plan", "--scheme", "w8a8-dynamic"),
        ("fit", "--soc", "8gen3"),
        ("simulate", "--device", "8gen3", "--prompt-lengths", "64"),
        ("support",),
    ],
    ids=" ".join,
)
def test_commands_treat_a_stale_tie_as_untied(folders, arguments, command):
    honest, stale, _ = folders
    name, *options = arguments
    outputs = []
    for folder in (honest, stale):
        finished = command(name, folder, *options, "--json")
        assert finished.status == 0
        outputs.append(finished.out.replace(json.dumps(str(folder))[1:-1], ""))
    assert json.loads(outputs[0]) == json.loads(outputs[1])
