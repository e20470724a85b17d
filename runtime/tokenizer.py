"""How does text become tokens, and tokens text again, also in a stream?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from membound.roofline.errors import MemboundError

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types of special tokens and of added words
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(MemboundError):
    """A vocabulary or a chat template that membound cannot use."""


class Tokenizer:
    """Byte-level BPE over one vocabulary. Text is data: `encode` never makes a special token of it.

    `eos_ids` are the tokens at which a model stops.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, chat_template: str, eos_ids: Iterable[int]) -> None:
        self._bpe = bpe
        self._bpe.encode_special_tokens = True
        self._chat_template = chat_template
        known = (bpe.token_to_id(token) for token in _END_TOKENS)
        self.eos_ids = frozenset(eos_ids) | {token_id for token_id in known if token_id is not None}
        self._special_ids = frozenset(i for i, token in bpe.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuilds the tokenizer of a GGUF; raises TokenizerError if it is not byte-level BPE of a known kind."""
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise TokenizerError(f"tokenizer.ggml.model is {model!r}, which is not supported: it must be gpt2.")
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        pre = metadata.get("tokenizer.ggml.pre", "default")
        vocabulary = {token: i for i, token in enumerate(tokens)}
        bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
        bpe.pre_tokenizer = _pre_tokenizer(pre)
        if pre == "qwen2":
            bpe.normalizer = normalizers.NFC()
        bpe.decoder = decoders.ByteLevel()
        typed = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
        bpe.add_special_tokens([AddedToken(token, special=True) for token, kind in typed if kind == _CONTROL])
        bpe.add_tokens([AddedToken(token) for token, kind in typed if kind == _USER_DEFINED])
        ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        return cls(bpe, metadata.get("tokenizer.chat_template", ""), (i for i in ends if i is not None))

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Reads a Hugging Face folder's `tokenizer.json` and `tokenizer_config.json`."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json, which is needed to make tokens of text.")
        bpe = tokenizers.Tokenizer.from_file(str(file))
        if "ByteLevel" not in repr(bpe.decoder):
            raise TokenizerError(f"{file} is not byte-level BPE, and no other tokenizer is supported.")
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        eos = config.get("eos_token") or ""
        eos_id = bpe.token_to_id(eos["content"] if isinstance(eos, dict) else eos)
        return cls(bpe, config.get("chat_template") or "", [] if eos_id is None else [eos_id])

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. A byte that the vocabulary lacks is dropped: SmolLM2's lacks six control characters."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, none for a special token; raises TokenizerError for an unknown id."""
        if token_id in self._special_ids:
            return b""
        token = self._bpe.id_to_token(token_id)
        if token is None:
            raise TokenizerError(f"Token id {token_id} is not in the vocabulary of {self._bpe.get_vocab_size()}.")
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()

    def chat(self, prompt: str, system: str | None = None) -> list[int]:
        """The ids with which a ChatML model answers `prompt`; without `system`, its template's default stands in.

        Raises TokenizerError if the model's chat template is not ChatML.
        """
        start, end = self._bpe.token_to_id("<|im_start|>"), self._bpe.token_to_id("<|im_end|>")
        if start is None or end is None or "<|im_start|>" not in self._chat_template:
            raise TokenizerError("The model's chat template is not ChatML, the only one that is supported.")
        system = _default_system_prompt(self._chat_template) if system is None else system
        turns = [("system", system)] if system is not None else []
        ids: list[int] = []
        for role, content in [*turns, ("user", prompt)]:
            ids += [start, *self.encode(f"{role}\n{content}"), end, *self.encode("\n")]
        return [*ids, start, *self.encode("assistant\n")]


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        split = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    digits = {"qwen2": "", "llama-bpe": "{1,3}"}.get(pre)
    if digits is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {pre!r}, which is not supported: it must be smollm, qwen2 or llama-bpe."
        )
    words = pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _default_system_prompt(template: str) -> str | None:
    """The system prompt that a ChatML template writes out where the conversation has none."""
    found = re.search(r"<\|im_start\|>system(?:\n|\\n)([^'\"{}<]+)<\|im_end\|>", template)
    return None if found is None else found[1]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: visible Latin-1 for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
