"""What text do draft heads learn from? What the model itself writes, with the hidden states that it wrote it from.

The prompts are templates over everyday subjects, and beginnings of the reference manual and of modules that every
Python carries. Text and hidden states are kept in shards, so that an interrupted run goes on, and so that training
reads them instead of computing them again in each epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.runtime.decoder import Decoder
from membound.runtime.tokenizer import Tokenizer

BLOCK_SIZE = 16
SHARD = 48  # texts that are written at once
STDLIB_SHARE = 0.4  # prompts that are beginnings of manual pages and modules; the others are chats
STDLIB_PROMPT = 48
GREEDY_SHARE = 0.5  # texts that are written greedily; the others at TEMPERATURE, so that texts differ
TEMPERATURE = 0.7

_TEMPLATES = (
    "Explain how {} works.",
    "Write a short story about {}.",
    "Give me five tips about {}.",
    "What is {}, and why does it matter?",
    "Compare {} and {}.",
    "Write a Python function that deals with {}.",
    "Translate a sentence about {} into French.",
    "Make a JSON object that describes {}.",
    "List the most important facts about {}.",
    "How do I explain {} to a child?",
    "Write an e-mail to a colleague about {}.",
    "Summarize what you know about {} in three sentences.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "I have a problem with {}. What should I do?",
    "Describe step by step how to deal with {}.",
)
_SUBJECTS = (
    "a garden", "the ocean", "electric cars", "a sorting algorithm", "cooking rice", "the solar system", "a library",
    "learning a language", "a bicycle", "weather forecasts", "photosynthesis", "a family budget", "chess", "volcanoes",
    "a job interview", "healthy food", "a linked list", "running a marathon", "the human heart", "a train journey",
    "recycling", "ancient Rome", "a web server", "birds", "painting a room", "music theory", "the stock market",
    "sleep", "a lost dog", "bridges", "databases", "a birthday party", "coffee", "climate change", "the violin",
    "a mountain hike", "prime numbers", "teamwork", "vaccines", "a lighthouse", "regular expressions", "bees",
    "public transport", "a wooden table", "black holes", "time zones", "writing a novel", "a school play", "robots",
    "the water cycle", "winter clothes", "a text file", "friendship", "insurance", "a fishing boat", "probability",
    "housing prices", "a small bakery", "dinosaurs", "passwords", "meditation", "soccer", "a rainy day", "magnets",
    "a dictionary of words", "farming", "history lessons", "an old clock", "the immune system", "a bank account",
    "wind turbines", "a hotel reservation", "matrices", "a street market", "photography", "earthquakes", "a kitten",
    "software tests", "the printing press", "a broken window", "holidays", "a string of characters", "glaciers",
)  # fmt: skip
# Modules whose source is read, small and plain ones.
_MODULES = ("textwrap", "statistics", "shutil", "argparse", "csv", "heapq", "bisect", "string", "calendar", "fractions")


@dataclass(frozen=True)
class Text:
    """A prompt and what the model wrote behind it: `hidden` [tokens, hidden] are the normed states, bf16."""

    token_ids: Tensor  # [tokens] int64
    hidden: Tensor
    prompt_tokens: int


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Token ids of `count` prompts; the same for the same seed."""
    rng = random.Random(seed)
    passages = _passages(tokenizer)
    listed = []
    for _ in range(count):
        if rng.random() < STDLIB_SHARE:
            passage = rng.choice(passages)
            start = rng.randrange(max(1, len(passage) - STDLIB_PROMPT))
            listed.append(passage[start : start + STDLIB_PROMPT])
        else:
            template = rng.choice(_TEMPLATES)
            listed.append(tokenizer.chat(template.format(*rng.sample(_SUBJECTS, template.count("{}")))))
    return listed


def _passages(tokenizer: Tokenizer) -> list[list[int]]:
    texts = list(topics.topics.values())
    for name in _MODULES:
        source = Path(__import__(name).__file__ or "")
        texts.append(source.read_text("utf-8"))
    return [ids for text in texts if len(ids := tokenizer.encode(text)) > STDLIB_PROMPT]


class Corpus:
    """The shards of one folder, each a file of `SHARD` texts of `tokens` tokens behind their prompts."""

    def __init__(self, folder: Path, tokens: int, seed: int) -> None:
        self.folder = folder
        self.tokens = tokens
        self.seed = seed

    def written(self) -> list[Path]:
        """Files of the shards that are complete, in order."""
        return sorted(self.folder.glob(f"texts-{self.tokens}-{self.seed}-*.pt"))

    def write(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        shards: int,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> None:
        """Lets the model write until there are `shards` shards, or until `stop` says so; those there are stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for index in range(shards):
            target = self.folder / f"texts-{self.tokens}-{self.seed}-{index:04d}.pt"
            progress(index, shards)
            if target.exists():
                continue
            if stop():
                return
            seed = self.seed * 100_003 + index
            texts = write_texts(decoder, prompts(tokenizer, SHARD, seed), self.tokens, seed)
            partial = target.with_suffix(".partial")
            torch.save([(text.token_ids, text.hidden, text.prompt_tokens) for text in texts], partial)
            partial.replace(target)
        progress(shards, shards)

    def texts(self) -> Iterator[Text]:
        """All texts that were written."""
        for path in self.written():
            for token_ids, hidden, prompt_tokens in torch.load(path):
                yield Text(token_ids, hidden, prompt_tokens)


@torch.inference_mode()
def write_texts(decoder: Decoder, prompt_ids: list[list[int]], tokens: int, seed: int) -> list[Text]:
    """What the model writes behind each prompt, all at once: the first share of them greedily, the others sampled."""
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    count = len(prompt_ids)
    lengths = torch.tensor([len(ids) for ids in prompt_ids])
    width = -(-(int(lengths.max()) + tokens) // BLOCK_SIZE)
    table = torch.arange(count * width, dtype=torch.int32).view(count, width)
    cache = decoder.new_cache(count * width, BLOCK_SIZE, count)
    greedy = torch.arange(count) < GREEDY_SHARE * count
    written = [list(ids) for ids in prompt_ids]
    states: list[list[Tensor]] = [[] for _ in prompt_ids]
    new = [list(ids) for ids in prompt_ids]
    for _ in range(tokens):
        sizes = torch.tensor([len(ids) for ids in new])
        ends = torch.tensor([len(ids) for ids in written])
        positions = torch.cat([torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)])
        first_slot = (torch.arange(count) * width * BLOCK_SIZE).repeat_interleave(sizes)
        batch = RaggedBatch(
            positions=positions,
            slots=first_slot + positions,
            query_start=torch.cat([torch.zeros(1), sizes.cumsum(0)]).int(),
            context_len=ends.int(),
            block_table=table,
            most_queries=int(sizes.max()),
            seats=torch.arange(count),
        ).to(decoder.device)
        token_ids = torch.tensor([token for ids in new for token in ids], device=decoder.device)
        normed = decoder.hidden(token_ids, batch, cache).normed
        for kept, part in zip(states, normed.split(sizes.tolist()), strict=True):
            kept.append(part.to("cpu", torch.bfloat16))
        logits = decoder.logits(normed[(batch.query_start[1:] - 1).long()])
        sampled = torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=generator)[:, 0]
        chosen = torch.where(greedy.to(logits.device), logits.argmax(-1), sampled).tolist()
        new = [[token] for token in chosen]
        for ids, token in zip(written, chosen, strict=True):
            ids.append(token)
    return [
        Text(torch.tensor(ids), torch.cat(kept), int(length))
        for ids, kept, length in zip(written, states, lengths, strict=True)
    ]
