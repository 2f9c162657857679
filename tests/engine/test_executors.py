"""The executor of single tokens: it runs fewer subgraphs than that of prompts, and changes no bit."""

import numpy as np
import pytest
from fixture_checkpoints import checkpoint, input_ids

import chunkrt
from chunkrt.backends.native.backend import NativeBackend
from chunkrt.graph.rewrites import merged_on_cpu
from chunkrt.runtime.batcher import BATCHERS
from chunkrt.runtime.executor import ExecutorSet
from chunkrt.runtime.request import Request
from chunkrt.runtime.scheduler import Scheduler

NAMES = ("llama_gqa", "llama_biased_gguf", "gemma3_window_5", "qwen3_next_experts", "lfm2", "phi3_longrope_short")
NAMES += ("falcon_h1",)
CASES = [
    *((name, {"scheme": scheme}) for name in NAMES for scheme in ("w8a8-dynamic", "w4a8-dynamic")),
    ("llama_biased_gguf", {"scheme": "w8a16"}),
    ("llama_biased_gguf", {"scheme": "w8a8", "shadow": "all"}),
    ("gemma3_gguf", {"scheme": "w8a16"}),
    ("gemma3_gguf", {"scheme": "w8a8"}),
    ("llama_gqa", {"cache_dtype": "int8", "context_shift": True}),
]


def load(name, **options):
    return chunkrt.load(checkpoint(name), npu="native", chunk_length=8, threads=2, **options)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_merged_subgraphs_change_no_bit_of_logits_or_state(name, options):
    with load(name, **options) as engine:
        lanes = engine.loaded.scheduler.executors
        assert len(lanes.tokens.plan.subgraphs) == 2 < len(lanes.prompts.plan.subgraphs)
        unmerged = Scheduler(ExecutorSet.of_one(lanes.prompts), BATCHERS["packed"])
        merged, parts = engine.loaded.make_state(), engine.loaded.make_state()
        for token in input_ids(name)[:12]:
            ids = np.array([token], np.int64)
            found, expected = engine.loaded.run(Request(ids, merged)), unmerged.run(Request(ids, parts))
            np.testing.assert_array_equal(found.logits, expected.logits)
            assert len(found.record.events) == 2 < len(expected.record.events)
        for tensor, array in merged.tensors.items():
            np.testing.assert_array_equal(array, parts.tensors[tensor], err_msg=tensor)


def test_state_moves_between_executors():
    tokens = input_ids("qwen3_next")
    with load("qwen3_next") as engine:
        whole, mixed = engine.session(), engine.session()
        expected = whole.prefill(tokens[:30], logits="all").logits
        rows = [mixed.prefill(tokens[:9], logits="all").logits]
        rows += [mixed.prefill([token]).logits[None] for token in tokens[9:14]]
        mixed.prefill([1, 2, 3])
        mixed.rewind(14)  # to the end of a token's step, which the state kept
        rows += [mixed.prefill(tokens[14:30], logits="all").logits]
        np.testing.assert_allclose(np.concatenate(rows), expected, rtol=0, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("options", [{"ops": "-rms_norm"}, {"npu": "reference"}, {"npu": "onnxrt"}])
def test_unmerged_subgraphs_run_in_the_executor_of_prompts(options):
    with chunkrt.load(checkpoint("llama_gqa"), **{"npu": "native", **options}) as engine:
        lanes = engine.loaded.scheduler.executors
        assert lanes.tokens is lanes.prompts is lanes.few is lanes.many


def test_trace_calls_merged_subgraphs_layers():
    records = []
    with load("llama_gqa") as engine:
        session = engine.session()
        session.on_run = records.append
        session.prefill(range(9))
        session.prefill([4])
    prompt, token = (record.pipeline for record in records)
    assert {stage.work for stage in prompt.stages} == {"embedding", "linears", "attention"}
    assert [stage.work for stage in token.stages] == ["layers", "embedding"]
    assert [stage.has_state for stage in token.stages] == [True, False]


@pytest.mark.parametrize(("policy", "is_merged"), [("look_ahead", True), ("sequential", False)])
def test_prompt_of_one_chunk_runs_merged_subgraphs_unless_one_task_runs_at_a_time(policy, is_merged):
    tokens = input_ids("llama_gqa")[:9]
    with load("llama_gqa", policy=policy) as engine:
        plan = engine.plan
        with engine.session() as one, engine.session() as two:
            of_one, of_two = one.prefill(tokens[:8], logits="all"), two.prefill(tokens, logits="all")
    assert len(of_one.events) == (2 if is_merged else len(plan.subgraphs))
    assert len(of_two.events) > len(plan.subgraphs) > 2
    np.testing.assert_array_equal(of_one.logits, of_two.logits[:8])


def test_subgraphs_are_compiled_once_for_prompts_of_any_length(monkeypatch):
    compiled, compile_one = [], NativeBackend.compile

    def count(backend, subgraph, *rest):
        compiled.append(subgraph.name)
        return compile_one(backend, subgraph, *rest)

    monkeypatch.setattr(NativeBackend, "compile", count)
    with load("llama_biased_gguf") as engine:
        for length in (1, 8, 9, 30):
            engine.session().prefill(input_ids("llama_biased_gguf")[:length])
        parts = {subgraph.name for subgraph in engine.plan.subgraphs}
        assert sorted(compiled) == sorted(parts | {subgraph.name for subgraph in merged_on_cpu(engine.plan).subgraphs})
