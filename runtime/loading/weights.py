"""Under which names is the rest of the runtime given weights?"""

from __future__ import annotations

from membound.runtime.loading.gguf import load_gguf
from membound.runtime.loading.random import random_weights
from membound.runtime.loading.safetensors import load_safetensors
from membound.runtime.loading.store import LayerWeights, Weights, WeightsError

__all__ = ["LayerWeights", "Weights", "WeightsError", "load_gguf", "load_safetensors", "random_weights"]
