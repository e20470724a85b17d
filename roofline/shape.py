"""Which quantities of a batch decide the cost of its step? A few sums, never the batch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from membound.roofline.tiles import Tiles, tiles_of
from membound.roofline.within import MOST_DECODE_TOKENS, Within, pairs_within, sums_within, within_of

Count = float | NDArray[np.float64]


def is_there(amount: Count) -> Count:
    """1 where there is anything, else 0."""
    return np.asarray(amount > 0, dtype=np.float64) if np.ndim(amount) else float(amount > 0)


def whole_ones(count: Count, parts: Count) -> Count:
    """Whole ones on the fullest of some parts over which `count` are spread; of a mean count between whole numbers."""
    below = np.floor(count)
    fewer, more = (np.ceil(np.round(whole / parts, 9)) for whole in (below, below + 1.0))
    return fewer + (more - fewer) * (count - below)


class AttentionPart(NamedTuple):
    """Sums over sequences that each bring `q` new tokens behind `p` cached ones."""

    tokens: Count
    sequences: Count
    kv_tokens: Count
    attended: Count

    def windowed(self, window: int | None) -> AttentionPart:
        """As a layer sees it that looks `window` tokens back; sequences are taken to be equally long.

        Of q new tokens behind p cached ones the first w - p see all that came before, the others w: for a whole prompt
        of q > w tokens that is q w - w (w - 1) / 2 pairs.
        """
        if window is None:
            return self
        sequences = np.maximum(self.sequences, 1e-9)
        new = self.tokens / sequences
        cached = self.kv_tokens / sequences - new
        kv_tokens = np.minimum(self.kv_tokens, sequences * (window + new - 1.0))
        seeing_all = np.minimum(np.maximum(window - cached, 0.0), new)
        pairs = pairs_within(window, cached, new, seeing_all)
        return AttentionPart(self.tokens, self.sequences, kv_tokens, np.minimum(self.attended, sequences * pairs))

    def seeing(self, window: int, known: Count) -> AttentionPart:
        """As a layer with a window sees sequences that decode, of whose tokens before their guesses it sees `known`.

        Exact for a token each; how the pairs of guesses are cut off is that of equally long sequences.
        """
        sequences = np.maximum(self.sequences, 1e-9)
        new, cached = self.tokens / sequences, known / sequences - 1.0
        seeing_all = np.minimum(np.maximum(window - cached, 0.0), new)
        pairs = sequences * pairs_within(window, cached, new, seeing_all)
        return AttentionPart(self.tokens, self.sequences, known + self.tokens - self.sequences, pairs)

    def keeping(self, known: Count) -> AttentionPart:
        """As a layer sees sequences that decode, of whose tokens before their guesses its cache holds `known`."""
        guesses = self.tokens - self.sequences
        new = self.tokens / np.maximum(self.sequences, 1e-9)
        pairs = new * known + self.tokens * (new - 1.0) / 2.0
        return AttentionPart(self.tokens, self.sequences, known + guesses, pairs)

    def kept(self, budget: int) -> AttentionPart:
        """As a layer sees it whose cache holds `budget` tokens of a sequence: new ones see those and each other."""
        sequences = np.maximum(self.sequences, 1e-9)
        new = self.tokens / sequences
        kv_tokens = np.minimum(self.kv_tokens, sequences * (budget + new - 1.0))
        attended = np.minimum(self.attended, self.tokens * (budget - 1.0 + (new + 1.0) / 2))
        return AttentionPart(self.tokens, self.sequences, kv_tokens, attended)


# Amounts of a step that are not sums: those of its largest prompt.
LARGEST = ("largest_tokens", "largest_kv_tokens", "largest_attended")


@dataclass(frozen=True)
class StepShape:
    """The sums of a step; each a number, or an array with one entry a step.

    For sequences that each bring `q` new tokens behind `p` cached ones: `tokens` = sum of q; `sequences`; `kv_tokens`
    = sum of (p + q), what attention reads; `attended` = sum of q*p + q*(q+1)/2, the query-key pairs of causal
    attention; `logits_rows`, the positions whose logits are needed. The `prefill_` sums are the part of sequences that
    bring whole prompts or chunks of them, whose attention is another kernel's; the `largest_` amounts are those of the
    one prompt with most, since a prompt is not cut over ranks or micro-batches, which wait for whoever has it.

    What layers with a window see does not follow from these sums: `within` has it for each window that was asked for;
    nor do the `tiles` in which kernels compute prompts, where there are several. Without them sequences are taken to be
    equally long.
    """

    tokens: Count
    sequences: Count
    kv_tokens: Count
    attended: Count
    logits_rows: Count
    prefill_tokens: Count = 0.0
    prefill_sequences: Count = 0.0
    prefill_kv_tokens: Count = 0.0
    prefill_attended: Count = 0.0
    largest_tokens: Count = 0.0
    largest_kv_tokens: Count = 0.0
    largest_attended: Count = 0.0
    within: tuple[Within, ...] = ()
    tiles: tuple[Tiles, ...] = ()

    @property
    def prefill_part(self) -> AttentionPart:
        return AttentionPart(self.prefill_tokens, self.prefill_sequences, self.prefill_kv_tokens, self.prefill_attended)

    @property
    def decode_part(self) -> AttentionPart:
        return AttentionPart(
            self.tokens - self.prefill_tokens,
            self.sequences - self.prefill_sequences,
            self.kv_tokens - self.prefill_kv_tokens,
            self.attended - self.prefill_attended,
        )

    @property
    def decoding(self) -> StepShape:
        """The step of those who decode, without prompts, whose logits are needed at one position each."""
        part = self.decode_part
        within = tuple(Within(known.window, known.decode_tokens) for known in self.within)
        return StepShape(*part, part.sequences, within=within)

    def decode_within(self, window: int | None) -> AttentionPart:
        """Those who decode, as a layer sees them that looks `window` tokens back."""
        part = self.decode_part
        if window is None:
            return part
        known = self._known(window)
        return part.windowed(window) if known is None else part.seeing(window, known.decode_tokens)

    def decode_kept(self, budget: int) -> AttentionPart:
        """Those who decode, as a layer sees them whose cache holds `budget` tokens of each."""
        known = self._known(budget)
        return self.decode_part.kept(budget) if known is None else self.decode_part.keeping(known.decode_tokens)

    def prefill_within(self, window: int | None) -> AttentionPart:
        """Prompts, as a layer sees them that looks `window` tokens back."""
        part = self.prefill_part
        if window is None:
            return part
        known = self._known(window)
        if known is None:
            return part.windowed(window)
        return part._replace(kv_tokens=known.prefill_tokens, attended=known.prefill_attended)

    def tiles_within(self, window: int | None) -> Tiles:
        """The tiles of prompts' attention in layers that look `window` tokens back, or at all."""
        known = next((known for known in self.tiles if known.window == window), None)
        if known is not None:
            return known
        part = self.prefill_within(window)
        return Tiles.of_equal(window, part.tokens, part.sequences, part.attended)

    def _known(self, window: int) -> Within | None:
        return next((known for known in self.within if known.window == window), None)

    def seen_within(self, window: int) -> Within:
        """What layers with this window see, where nobody said it of equally long sequences."""
        known = self._known(window)
        if known is not None:
            return known
        decode, prefill = self.decode_part.windowed(window), self.prefill_part.windowed(window)
        decode_tokens = decode.kv_tokens - (decode.tokens - decode.sequences)
        return Within(window, decode_tokens, prefill.kv_tokens, prefill.attended)

    @classmethod
    def decode(cls, batch: Count, context: Count) -> StepShape:
        """One new token for each of `batch` sequences; `context` counts the new token too."""
        return cls.verify(batch, context, 0)

    @classmethod
    def verify(cls, batch: Count, context: Count, drafts: Count) -> StepShape:
        """One new token and `drafts` guesses for each of `batch` sequences, `context` tokens in all for each."""
        q = 1 + drafts
        cached = context - q
        return cls(batch * q, batch, batch * context, batch * (q * cached + q * (q + 1) / 2), batch * q)

    @classmethod
    def prefill(cls, batch: Count, prompt_tokens: Count, cached: Count = 0) -> StepShape:
        """`batch` prompts (or chunks) of `prompt_tokens` tokens each, behind `cached` tokens each."""
        tokens = batch * prompt_tokens
        kv_tokens = batch * (prompt_tokens + cached)
        each = prompt_tokens * cached + prompt_tokens * (prompt_tokens + 1) / 2
        pairs = batch * each
        one = np.minimum(batch, 1.0)  # or less, of a mean number
        largest = (one * prompt_tokens, one * (prompt_tokens + cached), one * each)
        return cls(tokens, batch, kv_tokens, pairs, batch, tokens, batch, kv_tokens, pairs, *largest)

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int]], windows: tuple[int, ...] = ()) -> StepShape:
        """From one (cached tokens, new tokens, logits rows) for each sequence of the step."""
        sums: tuple[Any, ...] = (*shape_sums(parts), sums_within(parts, windows), tiles_of(parts, windows))
        return cls(*sums)

    def __add__(self, other: StepShape) -> StepShape:
        """Both batches in one step."""
        mine, others = self.columns(), other.columns()
        windows = dict.fromkeys(known.window for known in (*self.within, *other.within))
        within = (
            Within(
                window,
                *(a + b for a, b in zip(self.seen_within(window)[1:], other.seen_within(window)[1:], strict=True)),
            )
            for window in windows
        )
        return StepShape(
            **{
                name: np.maximum(value, others[name]) if name in LARGEST else value + others[name]
                for name, value in mine.items()
            },
            within=tuple(within),
            tiles=self._tiles_with(other),
        )

    def _tiles_with(self, other: StepShape) -> tuple[Tiles, ...]:
        """The tiles of the prompts of both."""
        mine, others = (np.any(np.asarray(shape.prefill_sequences) > 0) for shape in (self, other))
        if not (mine and others):
            return self.tiles if mine else other.tiles
        windows = (None, *dict.fromkeys(known.window for known in (*self.within, *other.within)))
        return tuple(self.tiles_within(window) + other.tiles_within(window) for window in windows)

    def with_guesses(self, guesses: Count) -> StepShape:
        """A step in which each decoding sequence brings `guesses` more tokens behind those that it has cached."""
        if np.all(np.asarray(guesses) == 0):
            return self
        part = self.decode_part
        sequences = part.sequences
        tokens = part.tokens + guesses * sequences
        cached = part.kv_tokens - part.tokens
        each = tokens / np.maximum(sequences, 1e-9)
        return replace(
            self,
            tokens=self.prefill_tokens + tokens,
            kv_tokens=self.prefill_kv_tokens + cached + tokens,
            attended=self.prefill_attended + each * cached + tokens * (each + 1.0) / 2.0,
            logits_rows=self.logits_rows + guesses * sequences,
        )

    def divided(self, parts: Count) -> StepShape:
        """One of so many equal parts of the batch."""
        share = 1.0 / parts
        return StepShape(
            **{name: value if name in LARGEST else value / parts for name, value in self.columns().items()},
            within=tuple(known.scaled(share, share, share) for known in self.within),
            tiles=tuple(known.mapped(lambda amount: amount * share) for known in self.tiles),
        )

    def mapped(self, change: Callable[[Any], Any]) -> StepShape:
        """With each of the amounts changed."""
        columns = {name: change(amount) for name, amount in self.columns().items()}
        within = tuple(known.mapped(change) for known in self.within)
        return StepShape(**columns, within=within, tiles=tuple(known.mapped(change) for known in self.tiles))

    def filled(self, entries: int) -> StepShape:
        """So many equal steps."""
        return self.mapped(lambda amount: np.full(entries, amount, dtype=np.float64))

    def on_one_of(self, ranks: int) -> StepShape:
        """The part of the batch on the fullest of some ranks, over which whole sequences are spread evenly.

        Prompts and those who decode are spread each for themselves: the largest part is that of a rank with both.
        """
        if ranks == 1:
            return self
        decode, share = self.decode_part, _share_of_fullest(self.sequences - self.prefill_sequences, ranks)
        prompts = self._fullest_prompts(ranks)
        rows = self.logits_rows * _share_of_fullest(self.sequences, ranks)
        return self._of(AttentionPart(*(amount * share for amount in decode)), prompts, rows)

    def uneven(self, parts: Count, ranks: int) -> StepShape:
        """As if each of some parts of the batch had as many prompts as the fullest of them, for which all others wait.

        That has one on each of `ranks`, as far as there are any. Sequences that decode are spread evenly.
        """
        if not np.any(np.asarray(self.prefill_sequences) > 0):
            return self
        part = self.prefill_part
        filled = (np.minimum(whole, ranks * each) for whole, each in zip(part, self._largest_prompt, strict=True))
        fullest = map(np.maximum, self._fullest_prompts(parts), filled)
        return self._of(self.decode_part, AttentionPart(*(amount * parts for amount in fullest)), self.logits_rows)

    @property
    def _largest_prompt(self) -> AttentionPart:
        one = np.minimum(self.prefill_sequences, 1.0)
        return AttentionPart(self.largest_tokens, one, self.largest_kv_tokens, self.largest_attended)

    def _fullest_prompts(self, parts: Count) -> AttentionPart:
        """The prompts of the fullest of some parts, of which none has a piece of another's prompt.

        As much as whole prompts of the largest amount make, so that a short one beside them shortens no part.
        """
        amounts = zip(self.prefill_part, self._largest_prompt, strict=True)
        return AttentionPart(*(_fullest(whole, each, parts) for whole, each in amounts))

    def _of(self, decode: AttentionPart, prompts: AttentionPart, logits_rows: Count) -> StepShape:
        """A step of other parts, with prompts as large as these."""
        whole = AttentionPart(*(one + other for one, other in zip(decode, prompts, strict=True)))
        largest = (self.largest_tokens, self.largest_kv_tokens, self.largest_attended)
        shares = (
            decode.sequences / np.maximum(self.decode_part.sequences, 1e-30),
            prompts.kv_tokens / np.maximum(self.prefill_kv_tokens, 1e-30),
            prompts.attended / np.maximum(self.prefill_attended, 1e-30),
        )
        within = tuple(known.scaled(*shares) for known in self.within)
        tiles = tuple(known.mapped(lambda amount: amount * shares[-1]) for known in self.tiles)
        return StepShape(*whole, logits_rows, *prompts, *largest, within, tiles)

    def as_prompts(self) -> StepShape:
        """The same sequences, each with a whole prompt or a chunk of one, however short."""
        whole = (self.tokens, self.sequences, self.kv_tokens, self.attended)
        largest = (self.largest_tokens, self.largest_kv_tokens, self.largest_attended)
        means = (amount / np.maximum(self.sequences, 1.0) for amount in (self.tokens, self.kv_tokens, self.attended))
        within = []
        for known in self.within:
            part = self.decode_within(known.window)
            read, pairs = known.prefill_tokens + part.kv_tokens, known.prefill_attended + part.attended
            within.append(Within(known.window, 0.0 * known.decode_tokens, read, pairs))
        tiles = () if np.any(np.asarray(self.decode_part.sequences) > 0) else self.tiles
        larger = map(np.maximum, largest, means)
        sums: tuple[Any, ...] = (*whole, self.logits_rows, *whole, *larger, tuple(within), tiles)
        return StepShape(*sums)

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> StepShape:
        """The shapes that a table of steps has."""
        return cls(**{name: columns[name] for name in AMOUNTS}, within=within_of(columns))

    def columns(self) -> dict[str, Any]:
        """The sums by name, for a table of steps, but for those `within` windows and of `tiles`."""
        return {name: getattr(self, name) for name in AMOUNTS}

    @property
    def sums(self) -> tuple[Any, ...]:
        """All that makes it, in the order of the fields."""
        return (*self.columns().values(), self.within, self.tiles)


# The fields of a shape that every step has.
AMOUNTS = tuple(field.name for field in fields(StepShape) if field.name not in ("within", "tiles"))


def shape_sums(
    parts: Iterable[tuple[int, int, int]], decoding: int = 0, decoding_kv_tokens: int = 0
) -> tuple[Any, ...]:
    """The `AMOUNTS` of a step from one (cached tokens, new tokens, logits rows) for each of its sequences.

    Beside them `decoding` sequences bring a token each and attend to `decoding_kv_tokens` together.
    """
    tokens = sequences = logits_rows = float(decoding)
    kv_tokens = attended = float(decoding_kv_tokens)
    prefill_tokens = prefill_sequences = prefill_kv_tokens = prefill_attended = 0.0
    largest_tokens = largest_kv_tokens = largest_attended = 0.0
    for cached, new, rows in parts:
        pairs = new * cached + new * (new + 1) / 2
        tokens += new
        sequences += 1
        kv_tokens += cached + new
        attended += pairs
        logits_rows += rows
        if new > MOST_DECODE_TOKENS or (cached == 0 and new > 1):
            prefill_tokens += new
            prefill_sequences += 1
            prefill_kv_tokens += cached + new
            prefill_attended += pairs
            if new > largest_tokens:
                largest_tokens = new
            if cached + new > largest_kv_tokens:
                largest_kv_tokens = cached + new
            if pairs > largest_attended:
                largest_attended = pairs
    return (
        tokens,
        sequences,
        kv_tokens,
        attended,
        logits_rows,
        prefill_tokens,
        prefill_sequences,
        prefill_kv_tokens,
        prefill_attended,
        largest_tokens,
        largest_kv_tokens,
        largest_attended,
    )


def _share_of_fullest(count: Count, parts: Count) -> Count:
    """The share of whole ones that the fullest part has."""
    return _fullest(count, np.minimum(count, 1.0), parts) / np.maximum(count, 1e-30)


def _fullest(amount: Count, each: Count, parts: Count) -> Count:
    """Of an amount in ones of `each` what the fullest of some parts has, the mean at least."""
    return np.maximum(amount / parts, each * whole_ones(amount / np.maximum(each, 1e-30), parts))
