"""What does the interface say, in English and in Chinese? Data and units are never translated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

LANGUAGES = {"en": "English", "zh": "中文"}


class Translate:
    """The sentences of one language by key: `t("roofline.alt", operators=12)`."""

    def __init__(self, language: str) -> None:
        self._sentences = sentences(language)

    def __call__(self, key: str, **values: object) -> str:
        """The sentence with its placeholders filled; raises KeyError where a key or a placeholder is missing."""
        return self._sentences[key].format(**values)

    def name(self, key: str, title: str) -> str:
        """A term by its translation, which gives the English term too where people use it; else as it is."""
        return self._sentences.get(key, title)


@cache
def sentences(language: str) -> Mapping[str, str]:
    """All sentences of a language by key."""
    catalog: Mapping[str, str] = json.loads((resources.files(__package__) / f"{language}.json").read_text("utf-8"))
    return catalog


def language_of(locale: str | None) -> str:
    """The language for a browser's locale: Chinese for any `zh`, English otherwise."""
    return "zh" if (locale or "").lower().startswith("zh") else "en"
