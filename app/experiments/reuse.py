"""X3: what is left of a compressed KV cache when the next question is another one?"""

from __future__ import annotations

from membound.app.experiments.finding import Ask, Finding

QUESTION = "Compressed once, asked several questions: which policies of the KV cache still answer the last one?"


def run(ask: Ask) -> Finding:
    raise NotImplementedError
