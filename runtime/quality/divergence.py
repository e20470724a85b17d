"""How far is a lossy technique from the unmodified model on the texts of a scenario, and on text of its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from membound.roofline.comparison import Quality
from membound.roofline.scenario import Scenario
from membound.runtime.quality.reading import read
from membound.runtime.quality.texts import windows
from membound.simulator.scheduling.workload import requests_for

if TYPE_CHECKING:
    from membound.runtime.engine import Runtime

TEXTS = 12
ENGLISH_TOKENS = 2048


def divergence(reference: Scenario, technique: Scenario, runtime: Runtime) -> Quality | None:
    """The technique's price on English text, and on the scenario's own where it has recorded some.

    Both models read token by token, teacher-forced. Perplexity is that of English. KL divergence in nats and top-1
    agreement are those of the workload's texts (prompt and continuation) where it has recorded ones, else of English
    too. None for a model without a tokenizer, whose weights mean nothing.
    """
    tokenizer = runtime.model(reference).tokenizer
    if tokenizer is None:
        return None
    before, after = runtime.decoder(reference), runtime.decoder(technique)
    english = windows(tokenizer, "english", "evaluation", ENGLISH_TOKENS)
    judged = on_english = read(before, after, english.token_ids)
    requests = requests_for(reference)
    if requests[0].output_ids is not None:
        texts = {(request.prompt_ids or ()) + (request.output_ids or ()) for request in requests}
        judged = read(before, after, sorted(texts)[:TEXTS])
    return Quality(
        kl_nats=judged.kl_nats,
        top1_agreement=judged.top1_agreement,
        tokens=judged.tokens,
        against=f"{reference.setup.weights.name} weights",
        perplexity=on_english.perplexity,
        perplexity_before=on_english.perplexity_before,
        text=english.words,
    )
