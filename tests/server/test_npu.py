"""A server whose model runs on an emulated NPU."""

import threading

import httpx
import pytest
from calibrated import calibrated
from server_of_tests import serving

import chunkrt
from chunkrt.backends import qnn

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")
if not qnn.open_htp().is_emulated:
    pytest.skip("this machine has an NPU, and a compiler for that NPU alone", allow_module_level=True)


def test_concurrent_clients_get_the_answers_of_single_clients(tmp_path):
    path = tmp_path / "toy.npz"
    model = calibrated("llama_biased_gguf", path)

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]

    def keep(index):
        together[index] = ask(prompts[index])

    prompts, together = ["hello there, good day", "you"], [None, None]
    with chunkrt.load(model, npu="qnn", soc="SM8650", chunk_length=8, calibration=path) as engine:
        with serving(engine) as (_, url):
            threads = [threading.Thread(target=keep, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert together == [ask(prompt) for prompt in prompts]
        assert engine.loaded.npu_backend.name == "qnn"
        assert all(together)
