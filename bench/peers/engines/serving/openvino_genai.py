"""OpenVINO GenAI's continuous batching. Options: OpenVINO's properties, and its scheduler's enable_prefix_caching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.engines.openvino_genai import versions as versions
from peers.engines.serving.clock import Answer, Clock, num_arrived


class Runner:
    def __init__(self, model: Path, threads: int, context_length: int, options: Mapping[str, Any]) -> None:
        import openvino_genai

        self.api = openvino_genai
        own = dict(options)
        caches = own.pop("enable_prefix_caching", None)
        properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY", **own}
        scheduler = openvino_genai.SchedulerConfig()
        if caches is not None:
            scheduler.enable_prefix_caching = caches
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self.num_requests = 0
        self.settings = (
            "ContinuousBatchingPipeline, add_request() between step()s, its own scheduler settings "
            f"({scheduler.max_num_batched_tokens} tokens a step, dynamic_split_fuse {scheduler.dynamic_split_fuse}, "
            f"enable_prefix_caching {scheduler.enable_prefix_caching}, unlimited cache), "
            + ", ".join(f"{key} {value}" for key, value in properties.items())
        )

    def serve(self, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], new_tokens: int) -> list[Answer]:
        import openvino

        config = self.api.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        answers = [Answer() for _ in prompts]
        handles: list[Any] = []
        clock = Clock()
        while len(handles) < len(prompts) or self.pipeline.has_non_finished_requests():
            if not self.pipeline.has_non_finished_requests():
                clock.wait_until(arrivals[len(handles)])
            for tokens in inputs[len(handles) : num_arrived(arrivals, clock())]:
                handles.append(self.pipeline.add_request(self.num_requests, tokens, config))
                self.num_requests += 1
            self.pipeline.step()
            now = clock()
            for handle, answer in zip(handles, answers, strict=False):
                while handle.can_read():
                    for token in handle.read()[0].generated_ids:
                        answer.add(int(token), now)
        return answers
