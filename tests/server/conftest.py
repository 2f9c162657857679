"""A tiny model with a chat template, and a server of it."""

import json

import openai
import pytest
from fixture_checkpoints import checkpoint
from server_of_tests import serving

import chunkrt
from chunkrt.compile.compiler import compile_checkpoint
from chunkrt.engine_directory.manifest import write_manifest
from chunkrt.quant.scheme import SCHEMES, Recipe

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "engine"
    recipe = Recipe(scheme=SCHEMES["w8a8-dynamic"])
    compile_checkpoint(checkpoint("llama_biased_gguf"), recipe, {}, folder, model="toy")
    path = folder / "text.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    write_manifest(folder, model="toy", scheme=recipe.scheme)
    return folder


@pytest.fixture(scope="session")
def engine(chat_folder):
    with chunkrt.load(chat_folder, npu="native", chunk_length=8, threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine):
    with serving(engine) as (service, url):
        yield service, url


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        yield client
