"""OpenVINO GenAI on a GGUF, its continuous batching stepped in this process: `pip install openvino-genai`."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from protocol import Asked, seconds, serve


class OpenVino:
    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.requests = 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = max(asked.batches)
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": asked.threads}
        self.engine = openvino_genai.ContinuousBatchingPipeline(asked.model, scheduler, "CPU", properties)

    def decode(self, sequences: int) -> list[float]:
        handles = self._add(sequences, self.asked.context, self.asked.steps + 1)
        self.engine.step()  # all prompts and their first tokens
        times = [seconds(self.engine.step) for _ in range(self.asked.steps)]
        self._finish(handles)
        return times

    def prompt(self) -> float:
        handles = self._add(1, self.asked.prompt, 1)
        time_s = seconds(self.engine.step)
        self._finish(handles)
        return time_s

    def _add(self, sequences: int, tokens: int, new: int) -> list[openvino_genai.GenerationHandle]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False
        )
        handles = []
        for _ in range(sequences):
            self.requests += 1
            ids = openvino.Tensor(np.ones((1, tokens), dtype=np.int64))
            handles.append(self.engine.add_request(self.requests, ids, config))
        return handles

    def _finish(self, handles: list[openvino_genai.GenerationHandle]) -> None:
        while self.engine.has_non_finished_requests():
            self.engine.step()
        for handle in handles:
            handle.read_all()


if __name__ == "__main__":
    serve(OpenVino)
