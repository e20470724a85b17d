"""What did somebody mean who wrote a name that nothing has?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Below it two names have no more in common than any two words have.
_ALIKE = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, whatever its capitals and hyphens; None where none is like it."""
    spellings = {_plain(one): one for one in known}
    close = difflib.get_close_matches(_plain(name), spellings, n=1, cutoff=_ALIKE)
    return spellings[close[0]] if close else None


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """The known names, those most like `name` first."""
    likeness = difflib.SequenceMatcher(b=_plain(name))

    def unlike(one: str) -> float:
        likeness.set_seq1(_plain(one))
        return -likeness.ratio()

    return sorted(known, key=lambda one: (unlike(one), one))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'eagle'?`, or nothing where no known name is like it."""
    close = nearest(name, known)
    return "" if close is None else f"; did you mean '{close}'?"


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-")
