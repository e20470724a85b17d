"""How many tokens do layers with a limited window see of a batch of sequences of different lengths?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from membound.roofline.shape import Count

# A sequence with up to this many new tokens decodes or verifies drafts: attention is bound by reading its cache.
MOST_DECODE_TOKENS = 33


class Within(NamedTuple):
    """What layers that look `window` tokens back see of a step's sequences, whatever the length of each.

    `decode_tokens` = sum of min(p + 1, window) over those who decode, whose p cached tokens and one that is not are
    known before any guesses. Of prompts with q tokens behind p cached ones `prefill_tokens` = sum of
    min(p + q, window + q - 1), what attention reads, and `prefill_attended` are the query-key pairs.
    """

    window: int
    decode_tokens: Count
    prefill_tokens: Count = 0.0
    prefill_attended: Count = 0.0

    def mapped(self, change: Callable[[Any], Any]) -> Within:
        """With each of the sums changed."""
        return Within(self.window, *map(change, self[1:]))

    def scaled(self, decode: Count, prefill_tokens: Count, prefill_attended: Count) -> Within:
        """With these shares of what it has."""
        return Within(
            self.window,
            self.decode_tokens * decode,
            self.prefill_tokens * prefill_tokens,
            self.prefill_attended * prefill_attended,
        )


_COLUMN = "{}_within_{}"


def columns_within(windows: Iterable[int]) -> tuple[str, ...]:
    """What the columns of a table of steps are called that hold these sums."""
    return tuple(_COLUMN.format(name, window) for window in windows for name in Within._fields[1:])


def within_of(columns: Mapping[str, Any]) -> tuple[Within, ...]:
    """The sums that a table of steps holds, of all windows that it has."""
    first = _COLUMN.format(Within._fields[1], "")
    windows = [int(name.removeprefix(first)) for name in columns if name.startswith(first)]
    return tuple(Within(window, *(columns[name] for name in columns_within([window]))) for window in windows)


def sums_within(
    parts: Sequence[tuple[int, int, int]], windows: tuple[int, ...], decoding: Iterable[int] = ()
) -> tuple[Within, ...]:
    """What layers with each of the windows see of sequences, given as for `shape_sums`, beside others who decode.

    Of these layers see `decoding` tokens together, one number for each window, or there are none.
    """
    return tuple(
        [_within(parts, window, seen) for window, seen in zip(windows, decoding or [0] * len(windows), strict=True)]
    )


def _within(parts: Sequence[tuple[int, int, int]], window: int, decoding: int) -> Within:
    decode_tokens, prefill_tokens, prefill_attended = float(decoding), 0.0, 0.0
    for cached, new, _ in parts:
        if new <= MOST_DECODE_TOKENS and (cached or new == 1):
            decode_tokens += min(cached + 1, window)
        elif cached + new <= window:  # all of it is seen
            prefill_tokens += cached + new
            prefill_attended += new * (cached + (new + 1) / 2)
        else:
            prefill_tokens += min(cached, window - 1) + new
            prefill_attended += pairs_within(window, cached, new, max(window - cached, 0))
    return Within(window, decode_tokens, prefill_tokens, prefill_attended)


def pairs_within(window: int, cached: Any, new: Any, seeing_all: Any) -> Any:
    """Query-key pairs of `new` tokens behind `cached` ones, of which the first `seeing_all` see what came before."""
    return seeing_all * (cached + (seeing_all + 1.0) / 2.0) + (new - seeing_all) * window
