"""Under which of its many names is a model known?"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Words that follow or interrupt a name without changing a shape: how it was tuned, what it was quantized to, and what
# a benchmark asked of it (MLPerf's 99 and 99.9 % of the accuracy).
_TUNING = "instruct|chat|it|base|hf|think|thinking|reasoning|sft|dpo|rl|pt|preview"
_QUANTIZATION = (
    r"fp\d+|b?f16|int\d+|mxfp4|nvfp4|w\d+a\d+|\d+bit|awq|gptq|actorder|gguf|bnb|marlin|exl[23]|hqq|qat|"
    r"quantized|dynamic|static|pertensor|block|kv|mostly|\d+(\.\d+)?bpw|gs?\d+|mlx|dwq|ud|imatrix|autoround|unsloth"
)
_BENCHMARK = r"99(\.9)?|interactive|edge"
_IGNORED = re.compile(f"{_TUNING}|{_QUANTIZATION}|{_BENCHMARK}")
# What a hub or a registry calls a file, behind the format that it is in.
_FILE = re.compile(r"[-_.](gguf|mlx|i1)$|:latest$")
_FORMAT_AT_THE_END = re.compile(r"[-_. :](i?q\d(_[0-9a-z]+)*( - (small|medium|large))?|w\d+a\d+)$")
# A version whose point a hub's names may not have: InternVL3_5, MiniCPM-V-2_6, and not a size behind a number (2_13b).
_POINT = re.compile(r"(?<=\d)_(?=\d+(?![\dbm.]))")
# A size behind a colon, as Ollama's library has it: all parameters, and nothing of the active ones.
_SIZE = re.compile(r"^(.*):(\d+(?:\.\d+)?)([bmt])\b")
_ACTIVE = re.compile(r"a\d+(\.\d+)?b")
_BILLIONS = {"m": 1e-3, "b": 1.0, "t": 1e3}
# A version, a date, a length of context: what tells releases of one shape apart, and seldom shapes.
_RELEASE = re.compile(r"v\d+(\.\d+)*|\d{4}|\d+k|1m")


def normalise_name(name: str) -> str:
    """The key under which a model is looked up first.

    Case, an organisation before the last slash, separators, a remark in brackets, a leading "Meta-" and words of
    tuning and quantization do not count: `meta-llama/Meta-Llama-3.1-8B-Instruct-FP8` and `Llama3.1 8B` have the same
    key.
    """
    return _joined(_words(name))


def lookup_keys(name: str) -> Iterator[str]:
    """`normalise_name`, then shorter keys: without what follows the name as a release (`-v1.3`, `-2507`, `-16k`)."""
    words = _words(name)
    yield _joined(words)
    while words and _RELEASE.fullmatch(words[-1]):
        words = words[:-1]
        yield _joined(words)


def has_active_size(key: str, wanted: str) -> bool:
    """Is `key` the wanted one with the size of what is active behind it (`-A3B`), which registries leave out?"""
    return key.startswith(wanted) and bool(_ACTIVE.fullmatch(key[len(wanted) :]))


def family_and_size(name: str) -> tuple[str, float] | None:
    """The key of the family and the parameters in billions of a name that has its size behind a colon."""
    found = _SIZE.match(name.strip().lower())
    return (normalise_name(found[1]), float(found[2]) * _BILLIONS[found[3]]) if found else None


def _words(name: str) -> list[str]:
    text = re.sub(r"\(.*\)", "", name).strip().lower().rsplit("/", 1)[-1]
    text = _FORMAT_AT_THE_END.sub("", _FILE.sub("", text)).removeprefix("meta-")
    text = _POINT.sub(".", text)
    return [word for word in re.split(r"[-_ :]+", text) if not _IGNORED.fullmatch(word)]


def _joined(words: list[str]) -> str:
    key = ""
    for word in words:
        # numbers stay apart: Llama-2-13B is not Llama-213B
        key += ("-" if key[-1:].isdigit() and word[:1].isdigit() else "") + word
    return key
