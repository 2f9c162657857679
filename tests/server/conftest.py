"""A tiny model with a chat template, and a server of it."""

import functools
import ssl

import httpx
import openai
import pytest
from chat_model import write_chat_model
from server_of_tests import serving

import chunkrt


@pytest.fixture(scope="session", autouse=True)
def certificates():
    """Share one HTTPS context between all clients, because each would read all certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def patience():
    """Wait a minute for each answer: 5 s, which is httpx's own limit, may pass on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "post", "stream"):
            patch.setattr(httpx, name, functools.partial(getattr(httpx, name), timeout=60))
        yield


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("served") / "engine")


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
