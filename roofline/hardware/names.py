"""When do two names mean the same device?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|intel|habana|apple|google|cloud|amazon|aws|tesla|geforce|instinct|radeon|gpu|graphics)\b|\(tm\)|\(r\)"
)
_MEMORY_SIZE = re.compile(r"\b(\d+) ?g(?:i?b)?\b")
_POWER = re.compile(r"\b(\d{2,4}) ?w\b")
# How a device is built in, partitioned or called in full, none of which makes it another one.
_FORM = re.compile(
    r"\b(oam|hgx|superchip|grace (?:hopper|blackwell)|edition|generation|hbm3e?|gddr\dx?|vf|cts|nps1|spx"
    r"|(?:ai )?accelerators?|air cooled|liquid cooled)\b"
)
_SLOT = re.compile(r"\bpcie?(?: x16)?\b")
_CORES = re.compile(r"\b(\d+)[ -]?cores?\b")


class Reading(NamedTuple):
    """A normalised name, and what it said of the device, which has then to be checked: the size of its memory, its
    power, and whether it is a card in a slot."""

    name: str
    gigabytes: int | None = None
    watts: int | None = None
    is_card: bool = False


def normalised(name: str) -> str:
    """What two spellings of one device's name have in common: letters and digits, without vendor or brand.

    Letters are those of any script. Names are compared whole: a part of a name is another device (a laptop's RTX 4090
    is not an RTX 4090).
    """
    folded = _folded(name)
    return _letters(_VENDOR_WORDS.sub(" ", folded)) or _letters(folded)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name.casefold()).replace("_", " ")


def _letters(text: str) -> str:
    """Letters with their marks, digits, and the plus that tells two products apart."""
    return "".join(char for char in text if char.isalnum() or char == "+" or unicodedata.category(char)[0] == "M")


def readings(name: str) -> Iterator[Reading]:
    """The name as it is written, then without words of its form, without a slot, and without a power limit; each of
    them without a size of memory too."""
    whole = _folded(name)
    plain = _FORM.sub(" ", _CORES.sub(r"\1c", _MEMORY_SIZE.sub(r"\1gb", whole.replace("-", " "))))
    power, slot = _POWER.findall(plain), _SLOT.search(plain)
    yield from _sized(whole)
    yield from _sized(plain)
    if slot:
        yield from _sized(_SLOT.sub(" ", plain), is_card=True)
    if len(power) == 1:
        yield from _sized(_POWER.sub(" ", plain), watts=int(power[0]))


def _sized(text: str, *, watts: int | None = None, is_card: bool = False) -> Iterator[Reading]:
    yield Reading(normalised(text), None, watts, is_card)
    sizes, without = _MEMORY_SIZE.findall(text), normalised(_MEMORY_SIZE.sub(" ", text))
    if sizes and without:
        yield Reading(without, int(sizes[0]), watts, is_card)
