"""How far is a lossy technique from the unmodified model on the texts of a scenario, and on text of its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membound.roofline.precision import Precision
from membound.roofline.results.comparison import Quality
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import KvBudget
from membound.runtime.decoder import Decoder
from membound.runtime.quality.decoding import read_decoding
from membound.runtime.quality.reading import Reading, read
from membound.runtime.quality.retrieval import recall
from membound.runtime.quality.texts import Windows, windows
from membound.runtime.tokenizer import Tokenizer
from membound.simulator.scheduling.workload import requests_for

if TYPE_CHECKING:
    from membound.runtime.engine import Runtime

TEXTS = 12
ENGLISH_TOKENS = 2048


def divergence(reference: Scenario, technique: Scenario, runtime: Runtime) -> Quality | None:
    """The technique's price on English text, and on the scenario's own where it has recorded some.

    Both models read token by token, teacher-forced. Perplexity is that of English. KL divergence in nats and top-1
    agreement are those of the workload's texts (prompt and continuation) where it has recorded ones, else of English
    too. What a technique does to the KV cache shows in decode only: it is judged on the second half of English texts,
    and by what it finds in a text that it has read. None for a model without a tokenizer, whose weights mean nothing.
    """
    tokenizer = runtime.model(reference).tokenizer
    if tokenizer is None:
        return None
    before, after = runtime.decoder(reference), runtime.decoder(technique)
    english = windows(tokenizer, "english", "evaluation", ENGLISH_TOKENS)
    changes_cache = _cache(reference) != _cache(technique)
    judged = on_english = _read(before, after, english, changes_cache)
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
        recall=_recall(before, after, tokenizer) if changes_cache else None,
    )


def english_kl(reference: Scenario, technique: Scenario, runtime: Runtime, tokens: int) -> float:
    """KL divergence in nats on about so many tokens of English, of a model that reads text."""
    tokenizer = runtime.model(reference).tokenizer
    assert tokenizer is not None, "the caller has a model with text"
    text = windows(tokenizer, "english", "evaluation", tokens)
    changes_cache = _cache(reference) != _cache(technique)
    return _read(runtime.decoder(reference), runtime.decoder(technique), text, changes_cache).kl_nats


def _read(before: Decoder, after: Decoder, text: Windows, changes_cache: bool) -> Reading:
    """Both read the text; where they differ in their caches, its second halves token by token."""
    return (read_decoding if changes_cache else read)(before, after, text.token_ids)


def _cache(scenario: Scenario) -> tuple[Precision, KvBudget | None]:
    return scenario.setup.kv, scenario.setup.kv_budget


def _recall(before: Decoder, after: Decoder, tokenizer: Tokenizer) -> dict[str, tuple[float, float]]:
    whole, compressed = recall(before, tokenizer), recall(after, tokenizer)
    return {
        "visible": (whole.visible, compressed.visible),
        "hidden": (whole.hidden, compressed.hidden),
        "reused": (whole.reused, compressed.reused),
    }
