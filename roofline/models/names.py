"""Under which of its many names is a model known?"""

from __future__ import annotations

import re

# Words that follow or interrupt a name without changing a shape: how it was tuned, and what it was quantized to.
_TUNING = "instruct|chat|it|base|hf|thinking|reasoning|sft|dpo|pt|preview"
_QUANTIZATION = (
    r"fp\d+|bf16|int\d+|mxfp4|nvfp4|w\d+a\d+|\d+bit|awq|gptq|gguf|bnb|marlin|quantized|dynamic|static|pertensor|kv"
)
_IGNORED = re.compile(f"{_TUNING}|{_QUANTIZATION}")
_GGUF_FORMAT = re.compile(r"[-_. ]i?q\d(_[0-9a-z]+)*$")
_RELEASE = re.compile(r"v\d+(\.\d+)*|\d{4}")


def normalise_name(name: str, *, release: bool = True) -> str:
    """The key under which a model is looked up.

    Case, an organisation before the last slash, separators, a remark in brackets, a leading "Meta-" and words of
    tuning and quantization do not count: `meta-llama/Meta-Llama-3.1-8B-Instruct-FP8` and `Llama3.1 8B` have the same
    key. Neither does, without `release`, a version or a date (`-v1.3`, `-2507`).
    """
    text = re.sub(r"\(.*\)", "", name).strip().lower().rsplit("/", 1)[-1]
    text = _GGUF_FORMAT.sub("", text)
    words = [word for word in re.split(r"[-_ :]+", text.removeprefix("meta-")) if not _IGNORED.fullmatch(word)]
    if not release:
        words = [word for word in words if not _RELEASE.fullmatch(word)]
    key = ""
    for word in words:
        # numbers stay apart: Llama-2-13B is not Llama-213B
        key += ("-" if key[-1:].isdigit() and word[:1].isdigit() else "") + word
    return key
