"""How far is a lossy technique from the unmodified model on the texts of a scenario, and on text of its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from membound.roofline.precision import Precision
from membound.roofline.results.comparison import Quality
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import KvBudget
from membound.runtime.decoder import Decoder
from membound.runtime.quality.decoding import read_decoding
from membound.runtime.quality.reading import Reading, read
from membound.runtime.quality.retrieval import CONTEXTS, Recall, recall
from membound.runtime.quality.texts import Windows, windows
from membound.runtime.tokenizer import Tokenizer
from membound.simulator.scheduling.workload import requests_for

if TYPE_CHECKING:
    from membound.runtime.engine import Runtime

TEXTS = 12
ENGLISH_TOKENS = 2048

# What a cache that keeps or reads `budget` tokens loses shows only where there are more: texts are so many times as
# long, as far as the model's context and this many tokens in all allow. With these numbers a policy is judged on
# SmolLM2-135M within a minute: a prompt of 2,048 tokens takes 6 s of a processor's time, with H2O's scores 10.
BUDGETS_READ = 4
MOST_READ, MOST_TEXTS, DECODED = 16_384, 2, 256
BUDGETS_ASKED, BUDGET_CONTEXTS = 2, 2  # of contexts that are asked about, each read once a question
SENTENCE_TOKENS, ROOM_TO_ASK = 128, 64  # by which a context may pass its length, and for a question and its answer


def divergence(reference: Scenario, technique: Scenario, runtime: Runtime) -> Quality | None:
    """The technique's price on English text, and on the scenario's own where it has recorded some.

    Both models read token by token, teacher-forced. Perplexity is that of English. KL divergence in nats and top-1
    agreement are those of the workload's texts (prompt and continuation) where it has recorded ones, else of English
    too. What a technique does to the KV cache shows in decode only: it is judged on the last part of English texts, and
    by what it finds in a text that it has read; both are several times as long as a budget of tokens. None for a model
    without a tokenizer, whose weights mean nothing.
    """
    tokenizer = runtime.model(reference).tokenizer
    if tokenizer is None:
        return None
    before, after = runtime.decoder(reference), runtime.decoder(technique)
    changes_cache = _cache(reference) != _cache(technique)
    budget = technique.setup.kv_budget if changes_cache else None
    context = None if budget is None else judged_context(budget.tokens, before.spec.max_context)
    asked_after = 0 if budget is None else min(BUDGETS_ASKED * budget.tokens, MOST_READ)
    english = _english(tokenizer, ENGLISH_TOKENS, context)
    judged = on_english = _read(before, after, english, changes_cache, context)
    requests = requests_for(reference)
    if requests[0].output_ids is not None and not changes_cache:
        texts = {(request.prompt_ids or ()) + (request.output_ids or ()) for request in requests}
        judged = read(before, after, sorted(texts)[:TEXTS])
    return Quality(
        kl_nats=judged.kl_nats,
        top1_agreement=judged.top1_agreement,
        tokens=judged.tokens,
        against=f"{reference.setup.kv.name} cache" if changes_cache else f"{reference.setup.weights.name} weights",
        perplexity=on_english.perplexity,
        perplexity_before=on_english.perplexity_before,
        text=english.words,
        recall=_recall(before, after, tokenizer, asked_after) if changes_cache else None,
        context=context,
        budget=None if budget is None else budget.tokens,
    )


def judged_context(budget: int, max_context: int) -> int:
    """After how many tokens a cache is judged that keeps or reads `budget`: not more where the model sees no more."""
    return min(BUDGETS_READ * budget, max_context - DECODED, MOST_READ)


def english_kl(reference: Scenario, technique: Scenario, runtime: Runtime, tokens: int) -> float:
    """KL divergence in nats on about so many tokens of English, of a model that reads text."""
    tokenizer = runtime.model(reference).tokenizer
    assert tokenizer is not None, "the caller has a model with text"
    before, changes_cache = runtime.decoder(reference), _cache(reference) != _cache(technique)
    budget = technique.setup.kv_budget if changes_cache else None
    context = None if budget is None else judged_context(budget.tokens, before.spec.max_context)
    text = _english(tokenizer, tokens, context)
    return _read(before, runtime.decoder(technique), text, changes_cache, context).kl_nats


def _english(tokenizer: Tokenizer, tokens: int, context: int | None) -> Windows:
    """About so many tokens; with a `context`, as many texts as may be read that have DECODED tokens behind it."""
    if context is None:
        return windows(tokenizer, "english", "evaluation", tokens)
    each = context + DECODED
    return windows(tokenizer, "english", "evaluation", each * max(1, min(MOST_TEXTS, MOST_READ // each)), each)


def _read(before: Decoder, after: Decoder, text: Windows, changes_cache: bool, context: int | None) -> Reading:
    """Both read the text; where they differ in their caches, token by token behind the context, or the first half."""
    if changes_cache:
        return read_decoding(before, after, text.token_ids, context)
    return read(before, after, text.token_ids)


def _cache(scenario: Scenario) -> tuple[Precision, KvBudget | None]:
    return scenario.setup.kv, scenario.setup.kv_budget


def _recall(before: Decoder, after: Decoder, tokenizer: Tokenizer, least: int) -> dict[str, tuple[float, float]]:
    """Shares of questions that are answered about texts of `least` tokens or more, without and with the technique."""
    least = max(0, min(least, before.spec.max_context - SENTENCE_TOKENS - ROOM_TO_ASK))
    whole, compressed = _found(before, tokenizer, least), recall(after, tokenizer, _contexts(least), least_tokens=least)
    return {
        "visible": (whole.visible, compressed.visible),
        "hidden": (whole.hidden, compressed.hidden),
        "reused": (whole.reused, compressed.reused),
    }


def _contexts(least: int) -> int:
    return BUDGET_CONTEXTS if least else CONTEXTS


def _found(before: Decoder, tokenizer: Tokenizer, least: int) -> Recall:
    """What the unmodified decoder finds, with which every technique is compared: asked once."""
    known = _WHOLE.setdefault(before, {})
    if least not in known:
        known[least] = recall(before, tokenizer, _contexts(least), least_tokens=least)
    return known[least]


_WHOLE: WeakKeyDictionary[Decoder, dict[int, Recall]] = WeakKeyDictionary()
