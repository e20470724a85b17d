"""A tiny model in memory, scenarios over it, and kernels whose bits do not depend on the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from membound.kernels.dispatch import kernels_for
from membound.roofline.scenario import Scenario, parse_scenario
from membound.runtime.engine import Runtime

VOCAB = 61
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return Runtime(kernels=kernels_for("cpu", batch_invariant=True))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder / "config.json"


@pytest.fixture(scope="session")
def scenario_of(model: Path):
    """A scenario of ten prompts of known tokens over the tiny model."""
    rng = random.Random(1)
    prompts = model.parent / "prompts.jsonl"
    with prompts.open("w") as file:
        for i in range(10):
            ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 40))]
            item = {"id": f"p{i}", "task": "random", "text": "", "prompt_ids": ids, "output_ids": [0] * 40}
            file.write(json.dumps(item) + "\n")

    def build(*techniques: dict[str, Any], batch: int = 4, **fields: Any) -> Scenario:
        engine = {"max_num_seqs": batch, "max_batched_tokens": 160, "block_size": 4, "num_blocks": 200}
        return parse_scenario(
            {
                "name": "tiny",
                "model": str(model),
                "hardware": "H100-SXM5",
                "engine": engine | fields.pop("engine", {}),
                "techniques": [{"name": "continuous_batching"}, *techniques],
                "workload": {
                    "arrivals": {"kind": "closed_loop", "concurrency": batch},
                    "requests": 10,
                    "prompts": {"kind": "text", "file": str(prompts)},
                    "output_tokens": {"kind": "uniform", "low": 2, "high": 40},
                },
            }
            | fields
        )

    return build
