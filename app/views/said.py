"""What do workers and documents say in English, in the reader's language?

Workers speak English, to the terminal and the log too. A translation is found by the English sentence, whose
placeholders match what the worker put there.
"""

from __future__ import annotations

import re
import string
from functools import cache, lru_cache

from membound.app.figures.comparison import technique_title
from membound.app.i18n import Translate, sentences
from membound.roofline.techniques import TECHNIQUES

PREFIX = "says."
# Placeholders that hold a sentence of a worker themselves; the others hold names and numbers.
NESTED = ("part", "rest", "source")
# Placeholders that hold a count, so that a name with the same words is not taken for one.
COUNTS = (
    *("at", "attempt", "cell", "cells", "engines", "number", "of", "repeat", "repeats"),
    *("runs", "threads", "times", "total", "tries"),
)
# Names of techniques that are no word of any language, or a name that is written otherwise.
_NAMES = re.compile(rf"\b({'|'.join(name for name in TECHNIQUES if '_' in name or name == 'eagle')})\b")


def said(message: str, t: Translate) -> str:
    """A worker's sentence translated; as it is where no sentence of the catalog matches."""
    name, values = _parsed(message)
    if name is None:
        return message
    return t(f"says.{name}", **{key: said(value, t) if key in NESTED else value for key, value in values.items()})


def in_words(message: str, t: Translate) -> str:
    """The same with the titles of techniques for the names that scenarios have for them."""
    return _NAMES.sub(lambda name: technique_title(name.group(), t), said(message, t))


@lru_cache(maxsize=4096)
def _parsed(message: str) -> tuple[str | None, dict[str, str]]:
    """The sentence of the catalog that a message is, and what stands in its placeholders; a page says the same ones
    again and again."""
    for name, pattern in _patterns():
        if found := pattern.fullmatch(message):
            return name, found.groupdict()
    return None, {}


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """The sentences as patterns by name; those with more words of their own first, as they say more of what matches."""
    known = {key.removeprefix(PREFIX): words for key, words in sentences("en").items() if key.startswith(PREFIX)}
    parsed = {name: list(string.Formatter().parse(words)) for name, words in known.items()}
    own = {name: sum(len(literal) for literal, *_ in parts) for name, parts in parsed.items()}
    return [(name, re.compile(_pattern(parsed[name]))) for name in sorted(parsed, key=lambda name: -own[name])]


def _pattern(parts: list[tuple[str, str | None, str | None, str | None]]) -> str:
    holds = {field: r"[\d,]+" if field in COUNTS else ".+?" for _, field, _, _ in parts}
    return "".join(
        re.escape(literal) + ("" if field is None else f"(?P<{field}>{holds[field]})") for literal, field, _, _ in parts
    )
