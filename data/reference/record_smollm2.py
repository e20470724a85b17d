"""Records what transformers computes, as the independent reference for membound's decoder and tokenizer.

    python -m venv refvenv && refvenv/bin/pip install torch==2.13.0 transformers==5.24.0 gguf accelerate jinja2
    refvenv/bin/python data/reference/record_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

It writes `smollm2_transformers.json` and the folders `tiny_*` beside itself. Everything is computed in fp32. Of
SmolLM2 there are two references: "dequantized", the weights of the GGUF as they are, and "bf16", the same with
every matrix rounded to bf16, which is what membound computes with. The tiny models are random, their matrices
bf16 values stored as fp32.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

HERE = Path(__file__).parent
POSITIONS, TOP, GREEDY_TOKENS = 4, 32, 32
CHATS = {
    "chat-fact": "What is the capital of France?",
    "chat-chinese": "请用一句话解释什么是大语言模型。",
    "chat-code": "Write a Python function that reverses a linked list.",
}
TEXTS = {
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "chinese": "春天来了，公园里的花都开了，孩子们",
    "mixed": "Sales grew 12345.67 % 🙂\r\n\tπ ≈ 3.14159; naïve café",
    "one-token": "The",
    "long": "Autoregressive decoding reads every weight once for each token. " * 40,
}


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__, "python": platform.python_version()}


def round_matrices(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(parameter.bfloat16().float())


def top_logits(model: PreTrainedModel, ids: list[int]) -> list[dict[str, list[float]]]:
    """The largest logits at the last positions, first to last."""
    logits = model(torch.tensor([ids]), logits_to_keep=POSITIONS).logits[0]
    values, tokens = logits.topk(TOP)
    rows = zip(tokens.tolist(), values.tolist(), strict=True)
    return [{"ids": row, "logits": [round(value, 5) for value in top]} for row, top in rows]


def greedy(model: PreTrainedModel, ids: list[int]) -> dict[str, list[float]]:
    """A greedy continuation, and by how much each token's logit led the second."""
    out, leads, cache, new = [], [], None, ids
    for _ in range(GREEDY_TOKENS):
        step = model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = step.logits[0, -1], step.past_key_values
        first, second = logits.topk(2).values.tolist()
        new = [int(logits.argmax())]
        out += new
        leads.append(round(first - second, 5))
    return {"ids": out, "leads": leads}


def record_smollm2(gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    prompts = {}
    for name, text in CHATS.items():
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts[name] = {"chat": text, "ids": tokenizer(ids, add_special_tokens=False).input_ids}
    for name, text in TEXTS.items():
        prompts[name] = {"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids}
    for prompt in prompts.values():
        prompt["dequantized"] = top_logits(model, prompt["ids"])
    round_matrices(model)
    for prompt in prompts.values():
        prompt["bf16"] = top_logits(model, prompt["ids"])
        prompt["greedy"] = greedy(model, prompt["ids"])
    content = {"versions": versions(), "gguf": gguf.name, "prompts": prompts}
    (HERE / "smollm2_transformers.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def record_tiny(name: str, config: transformers.PreTrainedConfig) -> None:
    """A random model with random biases and norms too, so that none of them can be left out unnoticed."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for key, parameter in model.named_parameters():
        if "norm" in key:
            parameter.uniform_(0.5, 1.5)
        elif parameter.dim() == 1:
            parameter.normal_(std=0.5)
    round_matrices(model)
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    save_file({k: v.clone() for k, v in model.state_dict().items() if k not in tied}, folder / "model.safetensors")
    config.architectures = [type(model).__name__]
    config.to_json_file(folder / "config.json")
    ids = torch.randint(config.vocab_size, (48,)).tolist()
    logits = model(torch.tensor([ids])).logits[0, -POSITIONS:]
    expected = {"versions": versions(), "ids": ids, "logits": [[round(x, 5) for x in row] for row in logits.tolist()]}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.inference_mode():
        shape: dict[str, Any] = dict(vocab_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        shape |= dict(max_position_embeddings=64, initializer_range=0.2)
        record_tiny("tiny_qwen2", Qwen2Config(hidden_size=64, intermediate_size=64, tie_word_embeddings=True, **shape))
        record_tiny("tiny_qwen3", Qwen3Config(hidden_size=48, intermediate_size=80, head_dim=16, **shape))
        stretched: dict[str, Any] = dict(
            rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
        )
        rope = stretched | dict(original_max_position_embeddings=32)
        record_tiny("tiny_llama3", LlamaConfig(hidden_size=64, intermediate_size=64, rope_parameters=rope, **shape))
        record_smollm2(Path(sys.argv[1]))
