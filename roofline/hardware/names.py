"""When do two names mean the same device?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|intel|apple|google|amazon|aws|tesla|geforce|instinct|radeon|gpu|graphics)\b|\(tm\)"
)
_MEMORY_SIZE = re.compile(r"\b(\d+) ?gi?b\b")


def normalised(name: str) -> str:
    """What two spellings of one device's name have in common: letters and digits, without vendor or brand.

    Letters are those of any script. Names are compared whole: a part of a name is another device (a laptop's RTX 4090
    is not an RTX 4090).
    """
    folded = unicodedata.normalize("NFC", name.casefold()).replace("_", " ")
    return _letters(_VENDOR_WORDS.sub(" ", folded)) or _letters(folded)


def _letters(text: str) -> str:
    """Letters with their marks, digits, and the plus that tells two products apart."""
    return "".join(char for char in text if char.isalnum() or char == "+" or unicodedata.category(char)[0] == "M")


def readings(name: str) -> Iterator[tuple[str, int | None]]:
    """The normalised name, and the same without a memory size in it, which then has to be checked."""
    wanted = normalised(name)
    yield wanted, None
    sizes = _MEMORY_SIZE.findall(name.lower())
    without = normalised(_MEMORY_SIZE.sub(" ", name.lower()))
    if sizes and without:
        yield without, int(sizes[0])
