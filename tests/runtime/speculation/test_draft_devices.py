"""Drafters compute where the model does, wherever its weights were loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from membound.roofline.models import ModelSpec  # noqa: E402
from membound.runtime.loading.weights import random_weights  # noqa: E402
from membound.runtime.speculation.build import DraftHost  # noqa: E402


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_draft_head_shares_with_the_model_lies_where_its_decoder_computes(tied):
    """A model's weights are loaded on the host; device 'meta' stands for a GPU, which does not take them from there."""
    spec = ModelSpec(
        name="tiny",
        layers=1,
        hidden=32,
        vocab=64,
        attention={"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 16},
        ffn={"kind": "gated", "intermediate": 48},
        tie_embeddings=tied,
        max_context=64,
        source="a test",
    )
    weights = random_weights(spec, seed=1)
    for device in ("meta", "cpu"):
        decoder = SimpleNamespace(device=torch.device(device))
        shared = DraftHost(decoder, weights, [], 1, 16, None).outer_weights()
        assert {t.device.type for t in (shared.embed, shared.lm_head, shared.final_norm)} == {device}
    assert shared.lm_head is weights.lm_head and shared.embed is weights.embed, "nothing is copied on one device"
