"""llama.cpp on a GGUF, by llama-cpp-python's low-level calls: its `Llama` decodes one sequence only.

Its default build crashes on machines whose AMX is masked by a hypervisor; build it into an environment of its own with

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF" pip install --no-cache-dir llama-cpp-python
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as lib
import numpy as np
from protocol import Asked, seconds, serve

Item = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted
SILENT = lib.llama_log_callback(lambda *_: None)  # kept, or it is called after it was freed


class Llama:
    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        lib.llama_log_set(SILENT, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(asked.model.encode(), lib.llama_model_default_params())
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def decode(self, sequences: int) -> list[float]:
        length, steps = self.asked.context, self.asked.steps
        context = self._opened(sequences, length + steps + 8)
        for sequence in range(sequences):
            self._step(context, [(1, place, sequence, place == length - 1) for place in range(length)])
        batches = [[(1, length + step, sequence, True) for sequence in range(sequences)] for step in range(steps)]
        times = [seconds(lambda batch=batch: self._step(context, batch)) for batch in batches]
        lib.llama_free(context)
        return times

    def prompt(self) -> float:
        length = self.asked.prompt
        context = self._opened(1, length + 8)
        items = [(1, place, 0, place == length - 1) for place in range(length)]
        self._step(context, items)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        time_s = seconds(lambda: self._step(context, items))
        lib.llama_free(context)
        return time_s

    def _opened(self, sequences: int, tokens: int) -> Any:
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_batch = params.n_ubatch = max(512, sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self.asked.threads
        return lib.llama_init_from_model(self.model, params)

    def _step(self, context: Any, items: list[Item]) -> list[int]:
        batch = lib.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for i, (token, place, sequence, wanted) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(context)
        rows = [i for i, item in enumerate(items) if item[3]]
        best = [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (self.vocab,)).argmax()) for i in rows]
        lib.llama_batch_free(batch)
        return best


if __name__ == "__main__":
    serve(Llama)
