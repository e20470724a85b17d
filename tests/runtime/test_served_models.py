"""Are models of every kind served by the engine as the plain loop decodes them, one after the other?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from membound.kernels.reference import TorchKernels
from membound.roofline.hardware import get_hardware
from membound.roofline.scenario import parse_scenario
from membound.runtime.engine import Runtime
from membound.runtime.plain import generate_plain
from membound.simulator.scheduling.recorder import Recorder
from membound.simulator.scheduling.workload import requests_for

_MODEL: dict[str, Any] = {
    "name": "tiny",
    "layers": 3,
    "hidden": 48,
    "vocab": 256,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 12},
    "ffn": {"kind": "gated", "intermediate": 64},
    "tie_embeddings": False,
    "max_context": 512,
    "source": "a test",
}
_MIXTURE = {"kind": "moe", "experts": 6, "top_k": 2, "intermediate": 32, "shared_intermediate": 32}
_LATENT = {
    "kind": "mla",
    "heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_STATE = {"kind": "mamba2", "heads": 6, "head_dim": 16, "d_state": 8}
# what of the model, what of the scenario
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latent mixture with drafts": ({"attention": _LATENT, "ffn": _MIXTURE}, {"techniques": ["ngram_speculation"]}),
    "windows": ({"overrides": [{"layers": "::2", "attention": {"window": 20}}]}, {}),
    "states alone": ({"attention": _STATE, "ffn": {"kind": "none"}}, {}),
    "states and attention, preempted": (
        {"overrides": [{"layers": "1::2", "attention": _STATE}]},
        {"engine": {"num_blocks": 13}},
    ),
}
_ENGINE = {"max_num_seqs": 4, "max_batched_tokens": 48, "block_size": 16, "batching": "chunked_prefill"}


class ExactKernels(TorchKernels):
    """The plain kernels with nothing rounded to bf16."""

    kv_dtype = torch.float32


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_requests_is_decoded_as_each_alone(case: str, tmp_path: Path) -> None:
    model, changes = CASES[case]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(_MODEL | model))
    scenario = parse_scenario(
        {
            "name": "served",
            "model": str(tmp_path / "model.yaml"),
            "hardware": "A100-SXM4-80GB",
            "workload": {
                "arrivals": {"kind": "closed_loop", "concurrency": 4},
                "requests": 4,
                "prompts": {"kind": "synthetic", "tokens": {"kind": "uniform", "low": 20, "high": 90}},
                "output_tokens": {"kind": "fixed", "tokens": 12},
            },
            **changes,
            "engine": _ENGINE | changes.get("engine", {}),
        }
    )
    runtime, recorder = Runtime("cpu", kernels=ExactKernels()), Recorder()
    result = runtime.run(scenario, get_hardware(scenario.hardware), recorder=recorder)
    if "preempted" in case:
        assert result.summary.preemptions > 0
    requests = requests_for(scenario, vocab=256)
    assert len(recorder.outputs) == len(requests) == 4
    decoder = runtime.decoder(scenario)
    for request in requests:
        assert list(recorder.outputs[request.id]) == list(generate_plain(decoder, request.prompt_ids, 12)), request.id
