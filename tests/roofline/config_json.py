"""Fields of a config.json by the names that most families use."""

from __future__ import annotations

from typing import Any


def config(architecture: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
    """A config.json of an architecture, with what is its own beside."""
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        **more,
    }
