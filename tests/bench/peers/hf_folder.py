"""Writes a GGUF as the Hugging Face folder that vLLM, ONNX Runtime and transformers read: GGUF FOLDER.

pip install torch==2.13.0 transformers gguf accelerate
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    gguf, folder = Path(sys.argv[1]), sys.argv[2]
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    del read.config.quantization_config  # its weights are in bf16 now, which it does not believe
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
