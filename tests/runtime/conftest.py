"""What the runtime's tests share: the recorded references, SmolLM2 where it can be had, tiny GGUFs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from membound.roofline.models import ModelSpec
from membound.roofline.reading.gguf_file import GgufFile
from membound.runtime.loading.assets import AssetError, fetch_smollm2
from membound.runtime.loading.weights import Weights, load_gguf
from membound.runtime.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


@pytest.fixture(scope="session")
def reference() -> Path:
    return REFERENCE


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return fetch_smollm2()
    except AssetError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[ModelSpec, Weights]:
    return load_gguf(smollm2_path)


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GgufFile(smollm2_path).metadata)


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    """What transformers computed for SmolLM2, by name of the prompt."""
    content = json.loads((REFERENCE / "smollm2_transformers.json").read_text(encoding="utf-8"))
    prompts: dict[str, Any] = content["prompts"]
    return prompts
