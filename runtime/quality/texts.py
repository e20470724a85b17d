"""Which text is a model calibrated on, and on which other text is it judged? Both come with every Python."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from membound.roofline.errors import MemboundError
from membound.runtime.tokenizer import Tokenizer

Kind = Literal["english", "code"]
Use = Literal["calibration", "evaluation"]

WINDOW = 512  # tokens that are read at once, each window by itself
_LARGEST_FILE = 60_000  # bytes: generated tables are longer


@dataclass(frozen=True)
class Windows:
    """Tokens of a text in pieces of equal length that are read one by one; `digest` names text, tokens and pieces."""

    kind: Kind
    use: Use
    token_ids: tuple[tuple[int, ...], ...]
    digest: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def words(self) -> str:
        """`english, 4096 tokens, sha256 0f3a...`, for the record."""
        return f"{self.kind}, {self.tokens} tokens, sha256 {self.digest}"


def documents(kind: Kind, use: Use) -> list[str]:
    """Every second topic of Python's manual, or file of its standard library, in the order of their names.

    The others are for the other use; a paragraph that is in a text for evaluation is left out of those for calibration.
    """
    texts = _texts(kind)
    if use == "evaluation":
        return texts[1::2]
    judged = {paragraph.strip() for text in texts[1::2] for paragraph in text.split("\n\n")}
    own = (
        "\n\n".join(part for part in text.split("\n\n") if part.strip() not in judged or not part.strip())
        for text in texts[::2]
    )
    return [text for text in own if text.strip()]


def windows(tokenizer: Tokenizer, kind: Kind, use: Use, tokens: int, window: int = WINDOW) -> Windows:
    """About `tokens` tokens, at least one window, spread evenly over all the text that there is for the use."""
    stream = tokenizer.encode("\n\n".join(documents(kind, use)))
    there = len(stream) // window
    wanted = max(1, round(tokens / window))
    if wanted > there:
        raise MemboundError(f"{tokens} tokens of {kind} text for {use} were asked for, and there are {there * window}")
    starts = [window * (i * there // wanted) for i in range(wanted)]
    chosen = tuple(tuple(stream[start : start + window]) for start in starts)
    return Windows(kind, use, chosen, _digest(chosen))


def calibration_windows(tokenizer: Tokenizer, tokens: int) -> tuple[tuple[int, ...], ...]:
    """About `tokens` tokens to calibrate on, English and code in equal parts."""
    halves = (windows(tokenizer, kind, "calibration", tokens // 2) for kind in ("english", "code"))
    return tuple(ids for half in halves for ids in half.token_ids)


@cache
def _texts(kind: Kind) -> list[str]:
    if kind == "english":
        return [topics[name] for name in sorted(topics)]
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.glob("*.py") if file.stat().st_size <= _LARGEST_FILE)
    if not files:
        raise MemboundError(f"{library} has no Python files, so that there is no code to read")
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def _digest(token_ids: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]
