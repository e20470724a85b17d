"""ONNX Runtime GenAI with 4-bit weights, built from a Hugging Face folder at the start.

pip install onnxruntime-genai onnx onnx-ir torch==2.13.0 transformers
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime_genai
from protocol import Asked, seconds, serve


class OnnxRuntime:
    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.folder = tempfile.TemporaryDirectory()
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "none", "-i", asked.model]
        subprocess.run([*builder, "-o", self.folder.name, "-p", "int4", "-e", "cpu"], check=True, stdout=sys.stderr)
        path = Path(self.folder.name, "genai_config.json")
        config = json.loads(path.read_text("utf-8"))
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = asked.threads
        path.write_text(json.dumps(config), "utf-8")
        self.model = onnxruntime_genai.Model(self.folder.name)

    def decode(self, sequences: int) -> list[float]:
        generator = self._opened(sequences, self.asked.context)
        generator.generate_next_token()
        return [seconds(generator.generate_next_token) for _ in range(self.asked.steps)]

    def prompt(self) -> float:
        ids = np.ones((1, self.asked.prompt), dtype=np.int32)
        generator = self._opened(1, 0)

        def read() -> None:
            generator.append_tokens(ids)
            generator.generate_next_token()

        return seconds(read)

    def _opened(self, sequences: int, tokens: int) -> onnxruntime_genai.Generator:
        params = onnxruntime_genai.GeneratorParams(self.model)
        longest = max(self.asked.prompt, self.asked.context + self.asked.steps) + 8
        params.set_search_options(batch_size=sequences, max_length=longest, min_length=longest, do_sample=False)
        generator = onnxruntime_genai.Generator(self.model, params)
        if tokens:
            generator.append_tokens(np.ones((sequences, tokens), dtype=np.int32))
        return generator


if __name__ == "__main__":
    serve(OnnxRuntime)
