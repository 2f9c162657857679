"""Models of the Hugging Face hub: the client's cache on disk, and a hub that is a server of this process."""

import hashlib
import json
import shutil
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from fixture_checkpoints import checkpoint

from chunkrt.checkpoints.checkpoint import choose_gguf, first_of_each, gguf_in
from chunkrt.checkpoints.hub import HubModel, cached_model, cached_models, fetch_model, parse_hub_id
from chunkrt.engine.resolve import find_checkpoint
from chunkrt.errors import ConfigError, ModelError
from chunkrt.files import no_progress

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GGUF = checkpoint("llama_biased_gguf")


@pytest.fixture(autouse=True)
def hub_home(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def put(folder, repository, files, *, revision="main", commit=COMMIT):
    """Write files in the layout of the client's cache: links to blobs."""
    place = folder / f"models--{repository.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    for name, content in files.items():
        blob = place / "blobs" / hashlib.sha256(content).hexdigest()
        for path in (blob, snapshot / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    return snapshot


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubModel(repository="org/name")),
        ("hf://org/name", HubModel(repository="org/name")),
        ("https://huggingface.co/org/name/", HubModel(repository="org/name")),
        ("org/name.v1-GGUF:Q4_0", HubModel(repository="org/name.v1-GGUF", quantisation="Q4_0")),
        ("org/name:q8_0@v1.0", HubModel(repository="org/name", quantisation="q8_0", revision="v1.0")),
        ("org/name@refs/pr/3", HubModel(repository="org/name", revision="refs/pr/3")),
        *((text, None) for text in ("name", "a/b/c", "./a", "../a", "/a/b", "a/", "a/..", "a/b.gguf", "a/b@../x")),
    ],
)
def test_ids_are_distinguished_from_paths(text, expected):
    assert parse_hub_id(text) == expected


def test_quantisation_selects_a_file():
    names = [
        "m-IQ4_K_M.gguf",
        "m-Q4_K_M.gguf",
        "m-q8_0.gguf",
        "sub/m-Q4_0-00001-of-00002.gguf",
        "sub/m-Q4_0-00002-of-00002.gguf",
    ]
    assert first_of_each([*names, "mmproj-f16.gguf", "README.md"]) == sorted(names[:4])
    assert choose_gguf(names, None, "m") == "m-Q4_K_M.gguf"
    assert choose_gguf(names, "Q8_0", "m") == "m-q8_0.gguf"
    assert choose_gguf(names, "q4_0", "m") == "sub/m-Q4_0-00001-of-00002.gguf"
    assert choose_gguf(["only.gguf"], None, "m") == "only.gguf"
    with pytest.raises(ModelError, match=r"m has no GGUF file with quantisation Q4; available: m-IQ4_K_M\.gguf, "):
        choose_gguf(names, "Q4", "m")


def test_cached_model_is_found_without_network_and_client(hub_home, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    content = GGUF.read_bytes()
    snapshot = put(hub_home, "org/name", {"m-Q4_0.gguf": content, "m-Q8_0.gguf": content})
    assert find_checkpoint("org/name", no_progress)[0] == snapshot / "m-Q8_0.gguf"
    assert find_checkpoint("org/name:Q4_0", no_progress)[0] == snapshot / "m-Q4_0.gguf"
    assert find_checkpoint(f"org/name@{COMMIT}", no_progress)[0] == snapshot / "m-Q8_0.gguf"
    folder = put(hub_home, "org/folder", {p.name: p.read_bytes() for p in checkpoint("llama_mha").iterdir()})
    assert find_checkpoint("org/folder", no_progress)[0] == folder
    assert dict(cached_models()) == {"org/name": snapshot / "m-Q8_0.gguf", "org/folder": folder}
    for absent in ("org/name:Q5_0", "org/name@v2", "org/other"):
        with pytest.raises(ConfigError, match=r'no file or folder org/\S+; .* pip install "chunkrt\[hub\]"'):
            find_checkpoint(absent, no_progress)


def test_incomplete_model_is_not_found(hub_home):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), "one.safetensors": b"1"}
    put(hub_home, "org/shards", files)
    assert cached_model(HubModel(repository="org/shards")) is None
    assert cached_model(HubModel(repository="org/absent")) is None
    put(hub_home, "org/parts", {"m-00001-of-00002.gguf": b"1"})
    assert cached_model(HubModel(repository="org/parts")) is None
    put(hub_home, "org/shards", {"two.safetensors": b"2"})
    assert cached_model(HubModel(repository="org/shards")).name == COMMIT


def test_folder_of_one_gguf_file_is_that_file(tmp_path):
    shutil.copy(GGUF, tmp_path / "m.gguf")
    assert find_checkpoint(str(tmp_path), no_progress)[0] == tmp_path / "m.gguf"
    (tmp_path / "link").symlink_to(tmp_path / "m.gguf")
    assert find_checkpoint(str(tmp_path / "link"), no_progress)[0] == tmp_path / "link"
    shutil.copy(GGUF, tmp_path / "n.gguf")
    assert gguf_in(tmp_path) is None


class _Hub(BaseHTTPRequestHandler):
    """The few addresses of the hub that its client requests."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self._answer(is_body_wanted=True)

    def do_HEAD(self):
        self._answer(is_body_wanted=False)

    def _answer(self, *, is_body_wanted):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        prefix = f"/org/name/resolve/{COMMIT}/"
        if path.startswith("/api/models/org/name/tree/"):
            rows = [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in self.files.items()]
            body, kind = json.dumps(rows).encode(), "application/json"
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
            kind = "application/json"
        elif path.startswith(prefix) and path.removeprefix(prefix) in self.files:
            body, kind = self.files[path.removeprefix(prefix)], "application/octet-stream"
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if is_body_wanted:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, hub_home):
    """Serve a hub with one repository; yields its files and the requested paths."""
    client = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    _Hub.files, _Hub.asked = {}, []
    whole = client.snapshot_download
    monkeypatch.setattr(client, "HfApi", lambda api=client.HfApi: api(endpoint=address))
    monkeypatch.setattr(
        client, "snapshot_download", lambda *a, **k: whole(*a, **k, endpoint=address, cache_dir=hub_home)
    )
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield _Hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_the_requested_quantisation_is_fetched(hub):
    hub.files = {"m-Q4_0.gguf": GGUF.read_bytes(), "m-Q8_0.gguf": b"x", "README.md": b"x"}
    path, _ = find_checkpoint("org/name:Q4_0", no_progress)
    assert path.read_bytes() == GGUF.read_bytes()
    assert not [asked for asked in hub.asked if "Q8_0" in asked or "README" in asked]
    hub.asked.clear()
    assert find_checkpoint("org/name:Q4_0", no_progress)[0] == path
    assert hub.asked == []


def test_safetensors_repository_is_fetched_without_unread_files(hub):
    source = checkpoint("llama_mha")
    hub.files = {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()}
    hub.files |= {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "onnx/config.json": b"{}"}
    hub.files |= {"1_Pooling/config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"x"}
    path = fetch_model(HubModel(repository="org/name"))
    assert (path / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (path / "pytorch_model.bin").exists()
    assert not (path / "onnx").exists()
    assert (path / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert (path / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"x"


def test_missing_model_of_the_hub_prints_one_line(hub):
    with pytest.raises(
        ModelError, match=r"no file or folder org/absent, and the Hugging Face hub .* lists known models"
    ) as raised:
        find_checkpoint("org/absent", no_progress)
    assert "\n" not in str(raised.value)
    hub.files = {"README.md": b"x"}
    with pytest.raises(ModelError, match=r"holds neither safetensors, pytorch_model\.bin nor GGUF"):
        find_checkpoint("org/name", no_progress)


def test_unreachable_hub_prints_one_line_without_the_clients_logs(monkeypatch, caplog, capfd):
    client = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(client, "HfApi", lambda api=client.HfApi: api(endpoint=address))
    with pytest.raises(ModelError, match=r"no file or folder org/name, and the Hugging Face hub .* lists known models"):
        find_checkpoint("org/name", no_progress)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
