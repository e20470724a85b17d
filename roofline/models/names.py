"""Under which of its many names is a model known?"""

from __future__ import annotations

import re

# What follows a name without changing a shape: how it was tuned, what it was quantized to, when it was made.
_SUFFIXES = (
    r"instruct|chat|it|base|hf|thinking|reasoning|sft|dpo|pt|preview|hybrid",
    r"fp\d+|bf16|int\d+|mxfp4|nvfp4|w\d+a\d+|awq|gptq|gguf|bnb|\d+bit|\d+bits",
    r"q\d(_[\dk]|_k_[sml])?|quantized|dynamic|kv|marlin|block|tensor|static|per|g\d+|g?ptq",
    r"v0\.\d|\d{4}|tp\d|hf",
)
_TAIL = re.compile(rf"[-_. :](?:{'|'.join(_SUFFIXES)})$")


def normalise_name(name: str) -> str:
    """The key under which a model is looked up.

    Case, an organisation before the last slash, separators, a leading "Meta-" and suffixes of tuning, quantization
    and date do not count: `meta-llama/Meta-Llama-3.1-8B-Instruct-FP8` and `Llama3.1 8B` are the same model.
    """
    text = name.strip().lower().rsplit("/", 1)[-1]
    text = text.removeprefix("meta-")
    while (shorter := _TAIL.sub("", text)) != text:
        text = shorter
    return re.sub(r"[-_ :]", "", text)
