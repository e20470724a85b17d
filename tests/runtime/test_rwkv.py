"""Does the decoder compute RWKV-6 and RWKV-7 as their authors' own package does?

Tiny random models in the authors' names for tensors; weights are rounded to bf16 in both, all else is fp32.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from membound.kernels.base import RaggedBatch
from membound.kernels.reference import TorchKernels
from membound.runtime.decoder import Decoder
from membound.runtime.loading.weights import load_safetensors
from membound.runtime.plain import single_sequence

HIDDEN, HEAD, INNER, VOCAB, LAYERS = 32, 16, 64, 96, 3
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "Rwkv6ForCausalLM": {
        **{f"att.time_maa_{name}": (1, 1, HIDDEN) for name in "xwkvrg"},
        "att.time_maa_w1": (HIDDEN, 5 * 32),
        "att.time_maa_w2": (5, 32, HIDDEN),
        "att.time_decay": (1, 1, HIDDEN),
        "att.time_decay_w1": (HIDDEN, 64),
        "att.time_decay_w2": (64, HIDDEN),
        "att.time_faaaa": (HIDDEN // HEAD, HEAD),
        **{f"att.{name}.weight": (HIDDEN, HIDDEN) for name in ("receptance", "key", "value", "gate", "output")},
        "ffn.time_maa_k": (1, 1, HIDDEN),
        "ffn.time_maa_r": (1, 1, HIDDEN),
        "ffn.receptance.weight": (HIDDEN, HIDDEN),
    },
    "Rwkv7ForCausalLM": {
        **{f"att.x_{name}": (1, 1, HIDDEN) for name in "rwkvag"},
        **{f"att.{name}0": (1, 1, HIDDEN) for name in "wav"},
        **{f"att.{name}1": (HIDDEN, 8) for name in "wavg"},
        **{f"att.{name}2": (8, HIDDEN) for name in "wavg"},
        "att.k_k": (1, 1, HIDDEN),
        "att.k_a": (1, 1, HIDDEN),
        "att.r_k": (HIDDEN // HEAD, HEAD),
        **{f"att.{name}.weight": (HIDDEN, HIDDEN) for name in ("receptance", "key", "value", "output")},
        "ffn.x_k": (1, 1, HIDDEN),
    },
}
_BOTH: dict[str, tuple[int, ...]] = {
    **{f"{norm}.{part}": (HIDDEN,) for norm in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")},
    "ffn.key.weight": (INNER, HIDDEN),
    "ffn.value.weight": (HIDDEN, INNER),
}
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "head_size": HEAD,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    **dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 8),
}


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32


def authors_logits(architecture: str, path: Path, *sequences: list[int]) -> list[Tensor]:
    """Their logits [tokens, vocab] with the weights in `path`.pth; on import the environment chooses the version."""
    pytest.importorskip("rwkv")
    with pytest.MonkeyPatch.context() as patch:
        newest = str(int(architecture == "Rwkv7ForCausalLM"))
        for name, value in (("RWKV_JIT_ON", "0"), ("RWKV_CUDA_ON", "0"), ("RWKV_V7_ON", newest)):
            patch.setenv(name, value)
        sys.modules.pop("rwkv.model", None)
        model = importlib.import_module("rwkv.model").RWKV(str(path), "cpu fp32")
        return [model.forward(ids, None, full_output=True)[0].detach() for ids in sequences]


def tensors_of(architecture: str) -> dict[str, Tensor]:
    """A random model, its matrices rounded to bf16."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"emb.weight": (VOCAB, HIDDEN), "head.weight": (VOCAB, HIDDEN)}
    shapes |= {f"{norm}.{part}": (HIDDEN,) for norm in ("ln_out", "blocks.0.ln0") for part in ("weight", "bias")}
    for layer in range(LAYERS):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in (SHAPES[architecture] | _BOTH).items()}

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if "ln" in name:
            return 0.3 * noise + name.endswith("weight")
        return (noise * (0.5 if 1 in shape else shape[-1] ** -0.5)).bfloat16().float()

    return {name: tensor(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("architecture", SHAPES)
def test_rwkv_is_what_its_authors_compute(architecture: str, tmp_path: Path) -> None:
    tensors = tensors_of(architecture)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]}))
    torch.save(tensors, tmp_path / "model.pth")
    a, b = list(range(3, 32)), list(range(60, 75))
    expected_a, expected_b = authors_logits(architecture, tmp_path / "model", a, b)
    assert expected_a.std() > 0.1

    decoder = Decoder(*load_safetensors(tmp_path), ExactKernels(), "fp32")
    batch = single_sequence(0, len(a), 2, decoder.device)
    whole = decoder.forward(torch.tensor(a), batch, decoder.new_cache(2, 16), torch.arange(len(a)))
    torch.testing.assert_close(whole, expected_a, rtol=0, atol=2e-4)

    cache, got = decoder.new_cache(1, 16, seats=2), []
    for pieces in (((0, 0, 12), (1, 0, 14)), ((1, 14, 15), (0, 12, 28)), ((0, 28, 29),)):
        lengths = [end - start for _, start, end in pieces]
        batch = RaggedBatch(
            positions=torch.cat([torch.arange(start, end) for _, start, end in pieces]),
            slots=torch.zeros(sum(lengths), dtype=torch.int64),
            query_start=torch.tensor([0, *lengths]).cumsum(0).int(),
            context_len=torch.tensor([end for *_, end in pieces], dtype=torch.int32),
            block_table=torch.zeros(len(pieces), 1, dtype=torch.int32),
            most_queries=max(lengths),
            seats=torch.tensor([1 - sequence for sequence, *_ in pieces]),
        )
        ids = [token for sequence, start, end in pieces for token in (a, b)[sequence][start:end]]
        logits = decoder.forward(torch.tensor(ids), batch, cache, torch.arange(len(ids)))
        got += [(piece, part) for piece, part in zip(pieces, logits.split(lengths), strict=True)]
    for (sequence, start, end), logits in got:
        torch.testing.assert_close(logits, (expected_a, expected_b)[sequence][start:end], rtol=0, atol=2e-4)
