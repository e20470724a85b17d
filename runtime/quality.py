"""What does a lossy technique cost in quality?"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.roofline.comparison import Quality
from membound.roofline.scenario import Scenario
from membound.runtime.decoder import Decoder
from membound.runtime.engine import Runtime
from membound.runtime.plain import BLOCK_SIZE, single_sequence
from membound.simulator.scheduling.workload import requests_for

TEXTS = 12


def divergence(reference: Scenario, technique: Scenario, runtime: Runtime) -> Quality | None:
    """KL divergence in nats and top-1 agreement of the technique's next-token distributions with the reference's.

    Both read the same recorded texts (prompt and continuation) token by token, teacher-forced; positions of the
    prompt's first token on all count. None where the workload has no recorded text.
    """
    requests = requests_for(reference)
    if requests[0].output_ids is None:
        return None
    before, after = runtime.decoder(reference), runtime.decoder(technique)
    texts = {(request.prompt_ids or ()) + (request.output_ids or ()) for request in requests}
    kl_sum = agreed = count = 0.0
    for token_ids in sorted(texts)[:TEXTS]:
        p = torch.log_softmax(_logits(before, token_ids), dim=-1)  # [tokens, vocab]
        q = torch.log_softmax(_logits(after, token_ids), dim=-1)
        kl_sum += float((p.exp() * (p - q)).sum())
        agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(token_ids)
    return Quality(
        kl_nats=kl_sum / count,
        top1_agreement=agreed / count,
        tokens=int(count),
        against=f"{reference.setup.weights.name} weights",
    )


def _logits(decoder: Decoder, token_ids: tuple[int, ...]) -> Tensor:
    """Logits [tokens, vocab] at every position of one text."""
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    batch: RaggedBatch = single_sequence(0, len(token_ids), blocks, decoder.device)
    ids = torch.tensor(token_ids, device=decoder.device)
    return decoder.forward(ids, batch, decoder.new_cache(blocks, BLOCK_SIZE), torch.arange(len(token_ids)))
