"""Which model does a scenario name: one of the catalog, or a file's?"""

from __future__ import annotations

import json
from pathlib import Path

from membound.roofline.models import ModelError, ModelSpec, get_model


def resolve_model(name_or_path: str) -> ModelSpec:
    """The catalog's model of that name, or the one that a Hugging Face `config.json` or a GGUF describes.

    Raises ModelError with one sentence for an unknown name, an unreadable file or an unsupported architecture.
    """
    path = Path(name_or_path)
    if path.suffix == ".gguf":
        # The gguf package takes half a second to import, which a catalog name should not cost.
        from membound.roofline.gguf_file import GgufFile

        file = GgufFile(path)
        return ModelSpec.from_gguf_metadata(
            file.metadata, path.stem, tie_embeddings="output.weight" not in file.tensors
        )
    if path.suffix != ".json":
        return get_model(name_or_path)
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"model '{name_or_path}' cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"model '{name_or_path}' is not JSON; give the path of a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ModelError(f"model '{name_or_path}' is JSON, but not the object that a config.json is")
    return ModelSpec.from_hf_config(config, path.parent.name or path.stem)
