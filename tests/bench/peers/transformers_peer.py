"""transformers in bf16 on a Hugging Face folder, eager: `pip install torch==2.13.0 transformers`."""

from __future__ import annotations

import torch
from protocol import Asked, seconds, serve
from transformers import AutoModelForCausalLM, DynamicCache


class Transformers:
    def __init__(self, asked: Asked) -> None:
        torch.set_num_threads(asked.threads)
        self.asked = asked
        self.model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)

    @torch.inference_mode()
    def decode(self, sequences: int) -> list[float]:
        cache = DynamicCache(config=self.model.config)
        self._step(torch.ones(sequences, self.asked.context, dtype=torch.int64), cache)
        one = torch.ones(sequences, 1, dtype=torch.int64)
        return [seconds(lambda: self._step(one, cache)) for _ in range(self.asked.steps)]

    @torch.inference_mode()
    def prompt(self) -> float:
        ids = torch.ones(1, self.asked.prompt, dtype=torch.int64)
        return seconds(lambda: self._step(ids, DynamicCache(config=self.model.config)))

    def _step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(dim=-1)


if __name__ == "__main__":
    serve(Transformers)
