"""Real models, with attention and decode on the emulated NPU: the greedy answer is the CPU's."""

import pytest
from pulled_models import MODELS

import chunkrt

pytest.importorskip("onnxruntime_qnn", reason="onnxruntime-qnn, which emulates the NPU, is not installed")

PROMPTS = {
    "smollm2-135m-instruct": [{"role": "user", "content": "What is the capital of France?"}],
    "gemma-3-270m": "The capital of France is",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_answer_of_a_model_on_the_npu_is_the_cpus(name):
    if MODELS[name] is None:
        pytest.skip(f"{name} is not there; `chunkrt pull {name}` fetches it")
    answers = {}
    for npu, options in (("native", {}), ("qnn", {"attention": "npu", "decode_on": "npu"})):
        with chunkrt.load(MODELS[name], npu=npu, scheme="w8a16", context_length=512, **options) as engine:
            prompt = PROMPTS[name]
            answer = engine.generate if isinstance(prompt, str) else engine.chat
            answers[npu] = answer(prompt, max_new_tokens=16, temperature=0)
            if npu == "qnn":
                assert engine.stats().npu.fallbacks == 0
    assert answers["qnn"] == answers["native"]
