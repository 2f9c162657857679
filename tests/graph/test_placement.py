"""Placement files: their meaning, and their errors."""

import pytest

from chunkrt.errors import ConfigError
from chunkrt.graph.decoders import build_decoder
from chunkrt.graph.modules import Module
from chunkrt.graph.partition import place
from chunkrt.graph.placement import layers_placement, read_placement
from chunkrt.testing.random_decoders import RandomCheckpoint


@pytest.fixture
def decoder():
    return build_decoder(RandomCheckpoint())


def placed(decoder):
    """Return the modules that have a place, except those with one by default."""
    return {m.path: m.device for m in decoder.modules() if m.device and m.path not in ("model.embed_tokens", "lm_head")}


def test_pattern_places_every_module_it_matches(decoder):
    place(decoder, {"model.layers.*.mlp.down_proj": "cpu"})
    assert placed(decoder) == {f"model.layers.{i}.mlp.down_proj": "cpu" for i in range(2)}


def test_later_line_wins(decoder, tmp_path):
    path = tmp_path / "placement.toml"
    path.write_text('"model.layers.*" = "cpu"\n"model.layers.1" = "npu"\n"lm_head" = "npu"\n')
    place(decoder, read_placement(path))
    assert placed(decoder)["model.layers.0"] == "cpu"
    assert placed(decoder)["model.layers.1"] == "npu"
    assert decoder.lm_head.device == "npu"


def test_later_line_overrides_a_part_of_an_earlier_one(decoder):
    place(decoder, {"model.layers.0.mlp": "cpu", "model.layers.1.mlp": "cpu", "model.layers.0": "npu"})
    assert placed(decoder) == {"model.layers.0": "npu", "model.layers.1.mlp": "cpu"}


def test_list_of_layers_places_all_other_layers_on_the_cpu(decoder):
    place(decoder, layers_placement("layers=1"))
    on_npu = {path for path, device in placed(decoder).items() if device == "npu"}
    assert on_npu == {"model.layers.1"}
    assert placed(decoder)["model.layers.0"] == "cpu"
    assert decoder.lm_head.device == "cpu"


@pytest.mark.parametrize(
    "text", ["layers=", "layers=a", "layers=0,,1", "layers=-1", "layers=1.5", "layers=0-3", "layers=" + "1" * 5000]
)
def test_list_that_is_not_of_numbers_is_refused(text):
    with pytest.raises(ConfigError, match="expected numbers of layers, as in layers=0,15"):
        layers_placement(text)


def test_parts_with_their_own_place_keep_it(decoder):
    place(decoder, {"": "npu"})
    assert decoder.model.embed_tokens.device == "cpu"


def test_pattern_that_matches_nothing_offers_the_nearest_path(decoder):
    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.down' matches no module; did you mean 'model\S+down_p"):
        place(decoder, {"model.layers.0.mlp.down": "cpu"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"lm_head" = "gpu"', "'lm_head' is placed on 'gpu', expected 'npu' or 'cpu'"),
        ('"lm_head" = 1', "'lm_head' is placed on 1, expected"),
        ("lm_head.weight = 'cpu'", "'lm_head' is placed on {'weight': 'cpu'}, expected"),
        ("lm_head = ", "cannot read the placement file .*placement.toml"),
        ("\0", "cannot read the placement file"),
    ],
)
def test_invalid_file_is_named_with_the_error(tmp_path, text, message):
    path = tmp_path / "placement.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_placement(path)


def test_file_that_is_not_utf_8(tmp_path):
    path = tmp_path / "placement.toml"
    path.write_bytes(b'"lm_head" = "\xff"')
    with pytest.raises(ConfigError, match="cannot read the placement file"):
        read_placement(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the placement file .*nowhere.toml"):
        read_placement(tmp_path / "nowhere.toml")


def test_module_cannot_be_placed_on_another_device():
    with pytest.raises(ConfigError, match="can be placed on 'npu' or 'cpu', not 'gpu'"):
        Module().to("gpu")
