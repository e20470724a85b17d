"""What becomes of attention's scores before they are weights: a cap, and a sink that no token is behind?"""

from __future__ import annotations

import torch
from torch import Tensor

from membound.kernels.triton import check


def check_scores(softcap: float | None, sinks: Tensor | None, q: Tensor) -> None:
    """Raises ValueError, which names the argument, where they do not fit q [tokens, heads, head_dim]."""
    check.require(softcap is None or softcap > 0, "softcap", f"is {softcap}, should be positive")
    if sinks is not None:
        check.tensor("sinks", sinks, [q.shape[1]], [torch.float32], q)


def shares(scores: Tensor, softcap: float | None, sinks: Tensor | None, seen: Tensor | None = None) -> Tensor:
    """The weights of `scores` [heads, ..., tokens], where some tokens may not be `seen`; with `sinks` [heads] they sum
    to less than 1. Sinks: gpt-oss, after Xiao et al. 2023, arXiv 2309.17453, section 3.3."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    own = sinks.view(-1, *[1] * (scores.dim() - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, own], dim=-1).softmax(-1)[..., :-1]
