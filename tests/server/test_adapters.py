"""Tests of LoRA adapters that requests choose."""

import shutil
from pathlib import Path

import httpx
import pytest
from fixture_checkpoints import checkpoint
from server_of_tests import serving

import chunkrt

FOLDER = Path(__file__).parents[1] / "data" / "adapters"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(FOLDER / "llama_biased", folder / "inside")
    with chunkrt.load(checkpoint("llama_biased_gguf"), npu="native", adapters=True) as engine:
        engine.load_adapter(FOLDER / "llama_biased", name="mine")
        with serving(engine, adapter_folder=folder) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
            yield engine, client


def completion(client, **fields):
    body = {"prompt": "a b c", "max_tokens": 6, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body)


@pytest.mark.parametrize("fields", [{"adapter": "mine"}, {"model": "mine"}, {"model": "toy:mine"}])
def test_request_chooses_an_adapter(server, fields):
    engine, client = server
    plain, found = completion(client, model="toy").json(), completion(client, **fields).json()
    texts = [engine.generate("a b c", max_tokens=6, adapter=adapter) for adapter in (None, "mine")]
    assert [plain["choices"][0]["text"], found["choices"][0]["text"]] == texts
    assert texts[0] != texts[1]
    assert (plain["model"], found["model"]) == ("toy", "mine")


def test_scores_depend_on_the_adapter(server):
    _, client = server
    body = {"text_1": "a b", "text_2": "c"}
    scores = [
        client.post("/v1/score", json=body | more).json()["data"][0]["score"] for more in ({}, {"adapter": "mine"})
    ]
    assert scores[0] != scores[1]


def test_models_list_the_adapters(server):
    _, client = server
    assert [(model["id"], model.get("parent")) for model in client.get("/v1/models").json()["data"]] == [
        ("toy", None),
        ("mine", "toy"),
    ]
    assert client.get("/v1/models/mine").json()["parent"] == "toy"


@pytest.mark.parametrize("fields", [{"adapter": "other"}, {"model": "other"}, {"model": "toy:other"}])
def test_unknown_adapter_is_refused(server, fields):
    found = completion(server[1], **fields)
    assert found.status_code == 404
    assert found.json()["error"]["message"].endswith("is not served here; available: toy, mine")


def test_client_loads_and_unloads_an_adapter_of_the_folder(server):
    _, client = server
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "inside"})
    assert (loaded.status_code, loaded.json()["id"]) == (200, "new")
    texts = [completion(client, adapter=name).json()["choices"][0]["text"] for name in ("new", "mine")]
    assert texts[0] == texts[1]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).json()["deleted"]
    assert completion(client, adapter="new").status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 404


def test_client_chooses_the_scale_of_an_adapter(server):
    engine, client = server
    body = {"lora_name": "none", "lora_path": "inside", "lora_scale": 0}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
    text = completion(client, adapter="none").json()["choices"][0]["text"]
    engine.unload_adapter("none")
    assert text == engine.generate("a b c", max_tokens=6)


@pytest.mark.parametrize("path", [str(FOLDER / "llama_biased"), "../x", ".", "absent"])
def test_path_outside_the_folder_is_refused(server, path):
    found = server[1].post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
    assert found.status_code == 400
    assert "not in the server's folder" in found.json()["error"]["message"] or path == "absent"


def test_clients_without_a_folder_may_not_load_adapters():
    with (
        chunkrt.load(checkpoint("llama_biased_gguf"), npu="native", adapters=True) as engine,
        serving(engine) as (_, url),
    ):
        found = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "inside"})
    assert found.status_code == 403
    assert "--adapter-folder" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter-scale", "a=2"], "--adapter-scale names 'a', which no --load-adapter loads"),
        (["--load-adapter", "a=b", "--adapter-scale", "a=two"], "--adapter-scale is 'a=two', expected NAME=FACTOR"),
        (["--load-adapter", "a=b", "--adapter-scale", "a"], "--adapter-scale is 'a', expected NAME=FACTOR"),
    ],
)
def test_serve_refuses_a_scale_that_has_no_adapter_or_is_no_number(command, flags, message):
    finished = command("serve", checkpoint("llama_biased_gguf"), "--adapters", *flags)
    assert (finished.status, message in finished.err) == (1, True)


def test_serve_refuses_adapters_without_the_option(command):
    finished = command("serve", checkpoint("llama_biased_gguf"), "--load-adapter", "a=b")
    assert (finished.status, finished.err) == (
        1,
        "chunkrt: --load-adapter has no effect without --adapters; omit it\n",
    )
