"""Does a model still find what it was told once its cache was compressed?

A context says a secret word of each of several cities between other sentences; it is read and compressed once, and
then asked for one word. Where the question was in sight when the context was compressed, a cache may keep what it
needs; where it was not, or where another question was, it had to guess (compress once, ask many: experiment X3 of
`shared/facts/claims.md`). An answer counts where the right word is the likeliest of all words that were told.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from membound.roofline.errors import MemboundError
from membound.runtime.decoder import Decoder
from membound.runtime.quality.decoding import Readers
from membound.runtime.quality.texts import documents
from membound.runtime.tokenizer import Tokenizer

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Tokyo Cairo Boston Denver Chicago Oslo Dublin Lisbon Athens Moscow Delhi "
    "Sydney Toronto Houston"
)
WORDS = (
    "apple river stone horse bread silver candle garden window bridge paper music forest winter copper orange ladder "
    "basket mirror pocket"
)
TOLD, ASKED, STEM = "The secret word of {} is {}.", "What is the secret word of {}?", "\nThe secret word of {} is"
PAIRS = 6  # with its whole cache SmolLM2-135M finds 16 of 18 words among 6 pairs, and 15 of 24 among 8
CONTEXTS = 3
SENTENCE_CHARACTERS = (80, 240)


@dataclass(frozen=True)
class Recall:
    """Shares of questions that were answered: asked of a context that was compressed with the question in sight
    (`visible`), with none (`hidden`), and with another one (`reused`). Chance is 1 / `choices`."""

    visible: float
    hidden: float
    reused: float
    questions: int
    choices: int
    context_tokens: int


@dataclass(frozen=True)
class Told:
    """A context, its cities and their words, as tokens where they are read."""

    context: list[int]
    cities: list[str]
    words: list[int]  # the first token of each
    stems: list[list[int]]  # the beginning of each one's answer


def recall(decoder: Decoder, tokenizer: Tokenizer, contexts: int = CONTEXTS, least_tokens: int = 0) -> Recall:
    """How much a decoder finds in `contexts` contexts of some words each, the same for every decoder.

    A context has at least `least_tokens` tokens, over all of which the words are spread. Raises MemboundError for a
    tokenizer in which too few of the words can be told apart.
    """
    cities, words = _asked_alike(tokenizer, CITIES.split(), PAIRS), _told_apart(tokenizer, WORDS.split(), PAIRS)
    sentences = _sentences()
    found = {"visible": 0, "hidden": 0, "reused": 0}
    tokens = 0
    for number in range(contexts):
        told = _told(tokenizer, random.Random(number), cities, words, sentences, PAIRS, least_tokens)
        tokens += len(told.context)
        questions = [tokenizer.encode(ASKED.format(city)) for city in told.cities]
        longest = len(told.context) + max(map(len, questions)) + len(told.stems[0])
        alone = Readers(decoder, [told.context], longest)
        found["hidden"] += sum(_answered(alone, told, [city]) for city in range(PAIRS))
        seen = Readers(decoder, [told.context + question for question in questions], longest)
        found["visible"] += _answered(seen, told, range(PAIRS))
        # In sight is the question for the next city.
        found["reused"] += _answered(seen, told, [(city - 1) % PAIRS for city in range(PAIRS)])
    total = contexts * PAIRS
    return Recall(
        visible=found["visible"] / total,
        hidden=found["hidden"] / total,
        reused=found["reused"] / total,
        questions=total,
        choices=PAIRS,
        context_tokens=tokens // contexts,
    )


def _answered(readers: Readers, told: Told, asked: Sequence[int]) -> int:
    """How many readers find the right word, each asked for one of the cities; they are as before then."""
    before = readers.state()
    for tokens in zip(*(told.stems[city] for city in asked), strict=True):
        readers.step(tokens)
    choices = readers.logits[:, told.words].argmax(dim=-1).tolist()
    readers.put_back(before)
    return sum(choice == city for choice, city in zip(choices, asked, strict=True))


def _told(
    tokenizer: Tokenizer,
    rng: random.Random,
    cities: Sequence[str],
    words: Sequence[str],
    sentences: Sequence[str],
    pairs: int,
    least_tokens: int,
) -> Told:
    chosen, hidden = rng.sample(cities, pairs), rng.sample(words, pairs)
    lines = []
    for number, (city, word) in enumerate(zip(chosen, hidden, strict=True), start=1):
        lines += [TOLD.format(city, word), rng.choice(sentences)]
        while len(tokenizer.encode("\n".join(lines))) * pairs < least_tokens * number:
            lines.append(rng.choice(sentences))
    firsts = [tokenizer.encode(f" {word}")[0] for word in hidden]
    stems = [tokenizer.encode(STEM.format(city)) for city in chosen]
    return Told(tokenizer.encode("\n".join(lines) + "\n"), chosen, firsts, stems)


def _sentences() -> list[str]:
    """Short paragraphs of Python's manual, one line each."""
    low, high = SENTENCE_CHARACTERS
    paragraphs = (part for text in documents("english", "evaluation") for part in text.split("\n\n"))
    lines = (" ".join(part.split()) for part in paragraphs)
    return [line for line in lines if low < len(line) < high]


def _asked_alike(tokenizer: Tokenizer, cities: Sequence[str], least: int) -> list[str]:
    """The cities whose stems have the most usual number of tokens, so that they are read in step."""
    lengths = [len(tokenizer.encode(STEM.format(city))) for city in cities]
    usual = max(set(lengths), key=lengths.count)
    return _enough([city for city, length in zip(cities, lengths, strict=True) if length == usual], least)


def _told_apart(tokenizer: Tokenizer, words: Sequence[str], least: int) -> list[str]:
    """The words whose first token no other word begins with."""
    firsts = [tokenizer.encode(f" {word}")[0] for word in words]
    return _enough([word for word, first in zip(words, firsts, strict=True) if firsts.count(first) == 1], least)


def _enough(words: list[str], least: int) -> list[str]:
    if len(words) < least:
        raise MemboundError(f"the tokenizer tells only {len(words)} of the words apart that retrieval asks for")
    return words
