"""Fetching checkpoints: from an HTTP server in this process that drops connections, ignores ranges and sends wrong data
on request."""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import sys
import threading
import tracemalloc
import types
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from fixture_checkpoints import checkpoint

from chunkrt.checkpoints import catalogue
from chunkrt.checkpoints.catalogue import fetch, storage
from chunkrt.checkpoints.catalogue.entry import CatalogueEntry, HubSource, PathSource, WheelPart, WheelSource
from chunkrt.checkpoints.checkpoint import open_checkpoint
from chunkrt.cli.models import models as models_command
from chunkrt.cli.pull import pull as pull_command
from chunkrt.errors import ConfigError, ModelError

CONTENT = os.urandom(300_000)
needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed in this environment")


class Server(ThreadingHTTPServer):
    """Serves `files` by path. A request takes the next of `breaks`: the number of bytes after which the connection
    breaks."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {}
        self.breaks = []
        self.knows_ranges = True
        self.only_for = ""
        self.ranges = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        if self.path not in server.files or server.only_for not in self.headers["User-Agent"]:
            self.send_error(404 if self.path not in server.files else 403)
            return
        content = memoryview(server.files[self.path])
        wanted = self.headers["Range"]
        server.ranges.append(wanted)
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.knows_ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = server.breaks.pop(0) if server.breaks else len(content)
        with contextlib.suppress(ConnectionError):  # the client may have closed the connection
            self.wfile.write(content[start : start + end])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CHUNKRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def direct(server, monkeypatch):
    """Skip pip, whose start takes time, in tests that are not about it."""
    monkeypatch.setattr(fetch, "wheel_address", lambda wheel: f"{server.url}/{wheel.distribution}")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def wheel_bytes(content, distribution="tiny-model"):
    info = f"{distribution.replace('-', '_')}-1.0.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def offer(server, contents=(CONTENT,), terms=None, **changes):
    """Put wheels with these contents on the server; return an entry that joins them."""
    parts = []
    for number, content in enumerate(contents):
        distribution = f"tiny-model-{number}"
        wheel = wheel_bytes(content, distribution)
        file = f"{distribution.replace('-', '_')}-1.0-py3-none-any.whl"
        server.files |= {
            f"/{distribution}": wheel,
            f"/files/{file}": wheel,
            f"/simple/{distribution}/": f'<a href="{server.url}/files/{file}">{file}</a>'.encode(),
        }
        known = {"bytes": len(wheel), "sha256": sha256(wheel), "member": "model.bin"} | changes
        parts.append(WheelPart(distribution=distribution, version="1.0", **known))
    whole = b"".join(contents)
    source = WheelSource(file="tiny.gguf", bytes=len(whole), sha256=sha256(whole), parts=tuple(parts))
    return entry_of(source, terms)


def entry_of(source, terms=None):
    return CatalogueEntry(
        name="tiny", family="llama", scheme="float", context_length=64, licence="mit", source=source, terms=terms
    )


def files_left(home):
    return sorted(path.name for path in (home / "models" / "tiny").iterdir())


PART = "tiny-model-0-1.0.part"


def test_member_of_a_wheel_becomes_a_file(server, direct, home):
    entry = offer(server)
    assert catalogue.pulled(entry) is None
    told = []
    path = fetch.pull(entry, lambda done, total: told.append((done, total)))
    assert path == home / "models" / "tiny" / "tiny.gguf" == catalogue.pulled(entry)
    assert path.read_bytes() == CONTENT
    assert files_left(home) == ["tiny.gguf"]
    assert told == sorted(told)
    assert told[-1] == (entry.source.parts[0].bytes, entry.source.parts[0].bytes)


def test_existing_file_is_not_fetched_again(server, direct):
    entry = offer(server)
    fetch.pull(entry)
    fetch.pull(entry)
    assert server.ranges == [None]


def damaged(content):
    return bytes([content[0] ^ 1]) + content[1:]


def test_damaged_file_is_fetched_again(server, direct, caplog):
    entry = offer(server)
    path = fetch.pull(entry)
    path.write_bytes(damaged(CONTENT))
    assert fetch.pull(entry).read_bytes() == damaged(CONTENT)  # otherwise every run would have to read all of it
    assert server.ranges == [None]
    assert fetch.pull(entry, is_verified=True).read_bytes() == CONTENT
    assert server.ranges == [None, None]
    assert "tiny.gguf is damaged (its SHA-256 is" in caplog.text
    fetch.pull(entry, is_verified=True)
    assert server.ranges == [None, None]


def test_truncated_file_is_fetched_again_on_use(server, direct):
    entry = offer(server)
    fetch.pull(entry).write_bytes(CONTENT[:-1])
    assert catalogue.damage(entry) == f"it has {len(CONTENT) - 1} bytes, expected {len(CONTENT)}"
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert catalogue.damage(entry) == ""


def test_file_without_a_source_is_kept(server, direct):
    entry = offer(server)
    path = fetch.pull(entry)
    server.files.clear()
    with pytest.raises(ModelError):
        fetch.pull(entry, is_forced=True)
    assert path.read_bytes() == CONTENT


def test_forced_pull_always_fetches(server, direct, tmp_path):
    entry = offer(server)
    assert fetch.pull(entry) == fetch.pull(entry, is_forced=True)
    assert server.ranges == [None, None]
    local = entry_of(PathSource(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be fetched"):
        fetch.pull(local, is_forced=True)


def test_commands_repair_and_report_damage(server, direct, monkeypatch):
    entry = offer(server)
    path = fetch.pull(entry)
    monkeypatch.setattr(catalogue, "find", lambda name: entry)
    monkeypatch.setattr("chunkrt.cli.models.entries", lambda: {entry.name: entry})
    for content, said in ((CONTENT, "yes"), (CONTENT[:-1], "damaged")):
        path.write_bytes(content)
        assert CliRunner().invoke(models_command, []).stdout.split()[-1] == said
    path.write_bytes(damaged(CONTENT))
    assert CliRunner().invoke(pull_command, ["tiny"]).exit_code == 0
    assert path.read_bytes() == CONTENT
    CliRunner().invoke(pull_command, ["tiny", "--force"])
    assert len(server.ranges) == 3


def test_members_of_several_wheels_are_joined_in_order(server, direct, home):
    entry = offer(server, (CONTENT[:1000], CONTENT[1000:5000], CONTENT[5000:]))
    told = []
    assert fetch.pull(entry, lambda done, total: told.append((done, total))).read_bytes() == CONTENT
    assert files_left(home) == ["tiny.gguf"]
    total = sum(part.bytes for part in entry.source.parts)
    assert told == sorted(told)
    assert told[-1] == (total, total)


THIRDS = (CONTENT[:1000], CONTENT[1000:5000], CONTENT[5000:])


def test_wheels_in_the_wrong_order_are_not_joined(server, direct, home):
    source = offer(server, THIRDS).source
    parts = source.parts[::-1]
    with pytest.raises(ModelError, match=r"tiny\.gguf is not the expected file: its SHA-256"):
        fetch.pull(entry_of(replace(source, parts=parts)))
    assert files_left(home) == [f"tiny-model-{number}-1.0.part" for number in range(3)]


@pytest.mark.parametrize("change", [-1, 1])
def test_file_of_another_length_is_not_kept(server, direct, home, change):
    source = offer(server, THIRDS).source
    with pytest.raises(ModelError, match=r"tiny\.gguf.*it has 300000 bytes, expected"):
        fetch.pull(entry_of(replace(source, bytes=source.bytes + change)))
    assert "tiny.gguf" not in files_left(home)


def test_damaged_wheel_among_several_is_fetched_again_next_time(server, direct, home):
    entry = offer(server, THIRDS)
    good = server.files["/tiny-model-1"]
    server.files["/tiny-model-1"] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(ModelError, match=r"/tiny-model-1 is not the expected file: its SHA-256 is"):
        fetch.pull(entry)
    assert files_left(home) == ["tiny-model-0-1.0.part"]
    server.files["/tiny-model-1"] = good
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert files_left(home) == ["tiny.gguf"]


def test_missing_wheel_among_several_keeps_the_others_for_the_next_time(server, direct, home, monkeypatch):
    entry = offer(server, THIRDS)
    third = server.files.pop("/tiny-model-2")

    def no_such_wheel(command, *options, wheel):
        raise ModelError(f"pip cannot get {wheel.distribution}=={wheel.version}: No matching distribution")

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "run_pip", no_such_wheel)
        with pytest.raises(ModelError, match=r"pip cannot get tiny-model-2==1.0"):
            fetch.pull(entry)
    assert "tiny.gguf" not in files_left(home)
    server.files["/tiny-model-2"] = third
    server.ranges.clear()
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert server.ranges == [f"bytes={part.bytes}-" for part in entry.source.parts[:2]] + [None]


def test_wheel_longer_than_expected_is_abandoned(server, direct, home):
    entry = offer(server)
    server.files["/tiny-model-0"] += bytes(8 << 20)
    told = []
    with pytest.raises(ModelError, match=rf"it has \d+ bytes, expected {entry.source.parts[0].bytes}"):
        fetch.pull(entry, lambda done, total: told.append(done))
    assert max(told, default=0) <= entry.source.parts[0].bytes
    assert files_left(home) == []


def test_terms_are_printed_only_when_a_model_is_fetched(server, direct, caplog):
    entry = offer(server, terms="https://example.org/terms")
    fetch.pull(entry)
    assert caplog.messages == ["tiny may be used under the terms at https://example.org/terms"]
    fetch.pull(entry)
    assert len(caplog.messages) == 1


def test_broken_connection_is_resumed(server, direct):
    server.breaks = [1000, 2000]
    assert fetch.pull(offer(server)).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-", "bytes=3000-"]


def test_next_pull_resumes_an_interrupted_one(server, direct, home):
    entry = offer(server)
    server.breaks = [1000, 0]
    with pytest.raises(ModelError, match="breaks off after 1000 bytes; try again"):
        fetch.pull(entry)
    assert files_left(home) == [PART]
    server.ranges.clear()
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]
    assert files_left(home) == ["tiny.gguf"]


def test_server_without_ranges_sends_everything_again(server, direct):
    server.knows_ranges = False
    server.breaks = [1000]
    assert fetch.pull(offer(server)).read_bytes() == CONTENT


@pytest.mark.parametrize("is_sound", [True, False])
def test_complete_download_is_not_repeated_and_a_wrong_beginning_is_fetched_again_once(server, direct, home, is_sound):
    entry = offer(server)
    part = home / "models" / "tiny" / PART
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files["/tiny-model-0"] if is_sound else b"something else")
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert server.ranges == ([f"bytes={entry.source.parts[0].bytes}-"] if is_sound else ["bytes=14-", None])


def test_unexpected_wheel_is_not_kept(server, direct, home):
    entry = offer(server, sha256="0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256 is .* expected 0000"):
        fetch.pull(entry)
    assert files_left(home) == []
    assert server.ranges == [None]


def test_unexpected_member_is_not_kept(server, direct, home):
    source = offer(server).source
    wrong = WheelSource(file=source.file, bytes=source.bytes, sha256="0" * 64, parts=source.parts)
    with pytest.raises(ModelError, match=r"tiny\.gguf is not .*: its SHA-256 is .* expected 0000"):
        fetch.pull(entry_of(wrong))
    assert files_left(home) == [PART]


def test_wheel_without_the_member_is_a_model_error(server, direct, home):
    with pytest.raises(ModelError, match=r"does not hold its part of tiny\.gguf.*'other\.bin'"):
        fetch.pull(offer(server, member="other.bin"))
    assert files_left(home) == [PART]


def test_too_small_disk_is_detected_beforehand(server, direct, home, monkeypatch):
    entry = offer(server)
    usage = types.SimpleNamespace(total=10**9, used=10**9, free=100_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"not enough space in .*: 1 MB needed, 0 MB free; make room"):
        fetch.pull(entry)
    assert files_left(home) == []
    assert server.ranges == []


class FullDisk(io.FileIO):
    """A file on a disk that holds 10 000 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("contents", [(CONTENT,), THIRDS], ids=["one wheel", "three wheels"])
@pytest.mark.parametrize("is_hidden", [False, True], ids=["of the wheel", "of the file"])
def test_full_disk_is_one_error_and_leaves_no_files(server, direct, home, monkeypatch, is_hidden, contents):
    real_open = Path.open

    def open_on_full_disk(path, mode="r", **options):
        if path.suffix == ".part" and path.name.startswith(".") == is_hidden and mode in ("ab", "wb"):
            return io.BufferedWriter(FullDisk(path, mode))
        return real_open(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(ModelError, match=r"not enough space in .*: 1 MB needed, .* MB free") as caught:
        fetch.pull(offer(server, contents))
    assert "\n" not in str(caught.value)
    assert files_left(home) == []


def test_interruption_leaves_only_resumable_files(server, direct, home):
    entry = offer(server)

    def interrupt(done, total):
        raise KeyboardInterrupt

    server.breaks = [5000]
    with pytest.raises(KeyboardInterrupt):
        fetch.pull(entry, interrupt)
    assert files_left(home) == [PART]
    server.ranges.clear()
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert server.ranges == ["bytes=5000-"]


def test_interruption_while_unpacking_leaves_only_resumable_files(server, direct, home, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.pull(offer(server))
    assert files_left(home) == [PART]


def test_second_pull_waits_for_the_first(server, direct, waiting):
    entry, fetching = offer(server), threading.Event()

    def hold(done, total):
        fetching.set()
        assert waiting.wait(60)

    paths = []
    first = threading.Thread(target=lambda: paths.append(fetch.pull(entry, hold)))
    second = threading.Thread(target=lambda: paths.append(fetch.pull(entry)))
    first.start()
    fetching.wait()
    second.start()
    first.join()
    second.join()
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == CONTENT
    assert server.ranges == [None]


def test_memory_does_not_grow_with_the_wheel(server, direct):
    entry = offer(server, (bytes(16 << 20),))
    tracemalloc.start()
    try:
        fetch.pull(entry)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20


@pytest.fixture
def index(server, monkeypatch):
    """Make the server pip's only package index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{server.url}/simple/", "PIP_RETRIES": "0"}
    for name, value in (settings | {"PIP_NO_CACHE_DIR": "1", "NO_PROXY": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)


@needs_pip
def test_pip_provides_the_wheels_address(server, index, home):
    path = fetch.pull(offer(server))
    assert path.read_bytes() == CONTENT
    assert files_left(home) == ["tiny.gguf"]


@needs_pip
def test_pip_fetches_if_only_pip_can(server, index, home):
    server.only_for = "pip/"
    assert fetch.pull(offer(server)).read_bytes() == CONTENT
    assert files_left(home) == ["tiny.gguf"]


@needs_pip
def test_wheel_fetched_by_pip_is_verified_too(server, index, home):
    server.only_for = "pip/"
    with pytest.raises(ModelError, match=r"not the expected file: its SHA-256 is .*, expected 0000.*; not used"):
        fetch.pull(offer(server, sha256="0" * 64))
    assert "tiny.gguf" not in files_left(home)


@needs_pip
def test_wheel_on_this_machine_is_copied(server, index, home, monkeypatch, tmp_path):
    entry = offer(server)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "tiny_model_0-1.0-py3-none-any.whl").write_bytes(server.files["/tiny-model-0"])
    assert fetch.pull(entry).read_bytes() == CONTENT
    assert server.ranges == []


@needs_pip
def test_wheel_unknown_to_pip_is_a_model_error(server, index):
    entry = offer(server)
    server.files.clear()
    with pytest.raises(ModelError, match=r"pip cannot get tiny-model-0==1.0: No matching distribution") as caught:
        fetch.pull(entry)
    assert "\n" not in str(caught.value)


def test_error_without_pip_has_the_install_command(server, monkeypatch):
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip, which finds the model's wheel, is not installed"):
        fetch.pull(offer(server))


def test_path_source_is_used_directly_or_reported_missing(tmp_path):
    entry = entry_of(PathSource(path=str(tmp_path / "m.gguf")))
    with pytest.raises(ModelError, match=r"m\.gguf, where the catalogue expects tiny, does not exist"):
        fetch.pull(entry)
    (tmp_path / "m.gguf").touch()
    assert fetch.pull(entry) == tmp_path / "m.gguf"


HUB = HubSource(repository="owner/model", revision="abc123")


def fake_hub(monkeypatch, snapshot_download):
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))


def test_hub_checkpoint_appears_complete(home, monkeypatch):
    def snapshot_download(repository, *, revision, local_dir, **patterns):
        assert (repository, revision) == ("owner/model", "abc123")
        local_dir.mkdir()
        (local_dir / "config.json").write_text("{}")
        assert catalogue.pulled(entry_of(HUB)) is None

    fake_hub(monkeypatch, snapshot_download)
    path = fetch.pull(entry_of(HUB))
    assert [file.name for file in path.iterdir()] == ["config.json"]
    assert files_left(home) == ["checkpoint"]
    assert catalogue.pulled(entry_of(HUB)) == path


def test_damage_names_the_command_that_fetches_again(home, monkeypatch, tmp_path):
    def snapshot_download(repository, *, local_dir, **options):
        shutil.copytree(checkpoint("llama_mha"), local_dir)

    fake_hub(monkeypatch, snapshot_download)
    monkeypatch.setattr(catalogue, "find", lambda name: entry_of(HUB))
    monkeypatch.setattr(storage, "find", catalogue.find)
    path = fetch.pull(entry_of(HUB))
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"; `chunkrt pull tiny --force` fetches it again$"):
        open_checkpoint(path)
    shutil.copytree(path, tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"; fetch it again$"):
        open_checkpoint(tmp_path / "elsewhere")
    assert CliRunner().invoke(pull_command, ["tiny", "--force"]).exit_code == 0
    open_checkpoint(path)


@pytest.mark.parametrize("content", [b"GGUF", b"", b"GGUX" + bytes(50)])
def test_damage_of_a_wheels_file_names_its_command_too(server, direct, monkeypatch, content):
    entry = offer(server, [checkpoint("llama_biased_gguf").read_bytes()])
    monkeypatch.setattr(storage, "find", lambda name: entry)
    path = fetch.pull(entry)
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"`chunkrt pull tiny` fetches it again$"):
        open_checkpoint(path)
    path.with_name("other.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r" fetch it again$"):
        open_checkpoint(path.with_name("other.gguf"))
    fetch.pull(entry, is_verified=True)
    open_checkpoint(path)


def test_failing_hub_is_a_model_error(monkeypatch):
    def snapshot_download(repository, **options):
        raise OSError("no such repository\nand much more")

    fake_hub(monkeypatch, snapshot_download)
    with pytest.raises(ModelError, match=r"cannot fetch owner/model from .*: no such repository$"):
        fetch.pull(entry_of(HUB))


def test_error_without_the_hubs_client_has_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r'pip install "chunkrt\[hub\]"'):
        fetch.pull(entry_of(HUB))


def test_home_folder_follows_the_environment(monkeypatch, tmp_path):
    assert catalogue.home() == tmp_path / "home"
    monkeypatch.delenv("CHUNKRT_HOME")
    monkeypatch.setenv("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path))
    assert catalogue.home() == tmp_path / "chunkrt"
    if sys.platform != "win32":
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert catalogue.home() == Path.home() / ".cache" / "chunkrt"


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """Return a catalogue with one entry of the user's, whose file exists."""
    (tmp_path / "m.gguf").touch()
    (tmp_path / "aa-mine.toml").write_text(
        'family = "llama"\nscheme = "float"\ncontext_length = 64\nlicence = "mit"\n'
        '[source]\nkind = "path"\npath = "m.gguf"\n'
    )
    monkeypatch.setenv("CHUNKRT_MODELS", str(tmp_path))
    return tmp_path / "m.gguf"


def test_models_command_lists_the_catalogue(listed):
    result = CliRunner().invoke(models_command, [])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["NAME", "FAMILY", "SIZE", "LICENCE", "PULLED"]
    assert lines[1].split() == ["aa-mine", "llama", "-", "mit", "yes"]
    assert any(line.split() == ["smollm2-135m-instruct", "llama", "98", "MB", "apache-2.0", "no"] for line in lines)
    assert "gemma-3-270m: terms of use at https://ai.google.dev/gemma/terms" in lines


def test_models_command_prints_json(listed):
    rows = json.loads(CliRunner().invoke(models_command, ["--json"]).stdout)
    assert rows[0] == {
        "name": "aa-mine",
        "family": "llama",
        "scheme": "float",
        "context_length": 64,
        "licence": "mit",
        "terms": None,
        "bytes": None,
        "path": str(listed),
        "damage": "",
    }
    assert [row["path"] for row in rows if row["name"] == "smollm2-135m-instruct"] == [None]


def test_pull_command_prints_only_the_path(listed):
    result = CliRunner().invoke(pull_command, ["aa-mine"])
    assert result.stdout == f"{listed}\n"
    assert result.stderr == ""


def test_fetched_model_is_removed_with_its_engines(server, direct, monkeypatch, home):
    entry = offer(server)
    fetch.pull(entry)
    monkeypatch.setattr("chunkrt.cli.models.entries", lambda: {entry.name: entry})
    for folder, model in (("mine", entry.name), ("other", "other")):
        (home / "engines" / folder).mkdir(parents=True)
        (home / "engines" / folder / "engine.json").write_text(json.dumps({"model": model}))
    result = CliRunner().invoke(models_command, ["--remove", entry.name, "--json"])
    assert {Path(row["path"]).name: row["bytes"] for row in json.loads(result.stdout)} == {
        "mine": len('{"model": "tiny"}'),
        "tiny": len(CONTENT),
    }
    assert catalogue.pulled(entry) is None
    assert [folder.name for folder in (home / "engines").iterdir()] == ["other"]
    for name, said in ((entry.name, "`chunkrt models` lists"), ("org/name", "hf cache rm model/org/name")):
        error = CliRunner().invoke(models_command, ["--remove", name]).exception
        assert isinstance(error, ConfigError)
        assert said in str(error)


def test_hub_models_are_listed_and_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"

    def snapshot_download(repository, **options):
        snapshot.mkdir(parents=True)
        (snapshot / "m-Q4_0.gguf").write_bytes(b"GGUF")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")

    fake_hub(monkeypatch, snapshot_download)
    sys.modules["huggingface_hub"].HfApi = lambda: types.SimpleNamespace(
        model_info=lambda repository, revision: types.SimpleNamespace(
            siblings=[types.SimpleNamespace(rfilename="m-Q4_0.gguf")]
        )
    )
    result = CliRunner().invoke(pull_command, ["org/name", "--json"])
    assert json.loads(result.stdout) == {"name": "org/name", "path": str(snapshot / "m-Q4_0.gguf")}
    lines = CliRunner().invoke(models_command, []).stdout.splitlines()
    assert any(line.split() == ["org/name", "-", "0", "MB", "-", "hub"] for line in lines)
    assert json.loads(CliRunner().invoke(models_command, ["--json"]).stdout)[-1]["path"] == str(
        snapshot / "m-Q4_0.gguf"
    )
