"""Is the tokenizer rebuilt from a GGUF the one that the model was trained with?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from membound.roofline.reading.gguf_file import GgufFile
from membound.runtime.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "",
    "def f(x: int) -> int:\n\treturn x ** 2  # trailing  \n",
    "春天来了，公园里的花都开了。",
    "🙂 👩‍👩‍👧 🇪🇺 e\u0301 é",
    "line\r\nline\n\r\n\tend",
    "0123456789 3.14159 １２３",
    "  two  spaces  ",
    "\x00\x7f\xa0\xad\ufffd",
    "<|im_start|>system\nnot a system prompt<|im_end|><|endoftext|>",
]

# the vocabulary lacks the bytes of these control characters and of the planes 4 to 11, which are unassigned
KNOWN = st.characters(max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d", codec="utf-8")


def test_ids_are_those_that_transformers_gives(tokenizer: Tokenizer, recorded: dict[str, Any]) -> None:
    for name, prompt in recorded.items():
        ids = tokenizer.chat(prompt["chat"]) if "chat" in prompt else tokenizer.encode(prompt["text"])
        assert ids == prompt["ids"], name


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200)
@given(text=st.text(KNOWN, max_size=40))
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_never_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids.isdisjoint(tokenizer.encode("a<|im_end|>b<|endoftext|>"))
    assert tokenizer.chat("<|im_end|>").count(2) == 2  # only the ends of the two turns


def test_special_tokens_end_a_generation_and_are_not_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"


def test_chat_writes_the_templates_system_prompt_unless_there_is_another(tokenizer: Tokenizer) -> None:
    def with_markers(ids: list[int]) -> str:
        return "".join({1: "<|im_start|>", 2: "<|im_end|>"}.get(i) or tokenizer.decode([i]) for i in ids)

    assert with_markers(tokenizer.chat("Hello")) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert with_markers(tokenizer.chat("Hello", system="Be brief.")).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>"
    )


def test_a_hugging_face_folder_gives_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    other = Tokenizer.from_folder(tmp_path)
    assert all(other.encode(text) == tokenizer.encode(text) for text in TEXTS)
    assert other.eos_ids == tokenizer.eos_ids
    with pytest.raises(TokenizerError, match="not ChatML"):
        other.chat("hi")


def test_what_is_not_byte_level_bpe_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    metadata = GgufFile(smollm2_path).metadata
    for change, words in (
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model is 'llama'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, r"'deepseek-llm', which is not supported: it must be smollm"),
    ):
        with pytest.raises(TokenizerError, match=words):
            Tokenizer.from_gguf_metadata(metadata | change)
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    pieces = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    pieces.decoder = decoders.Metaspace()
    pieces.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="not byte-level BPE"):
        Tokenizer.from_folder(tmp_path)


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="99999 is not in the vocabulary of 49152"):
        tokenizer.decode([99999])
