"""Is a model that is cut to its first layers the same in everything but their number?"""

from __future__ import annotations

import pytest

from membound.roofline.memory import weights_bytes
from membound.roofline.models import ModelError, get_model
from membound.roofline.models.files import published_formats, resolve_model
from membound.roofline.techniques import EngineSetup


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "DeepSeek-V3", "Gemma-2-2B", "Jamba-v0.1", "Nemotron-Nano-9B-v2"])
def test_the_first_layers_are_those_of_the_whole(name: str) -> None:
    whole, cut = get_model(name), resolve_model(f"{name}[:5]")
    assert cut.stack == whole.stack[:5] and cut.name == f"{name}[:5]"
    assert (cut.hidden, cut.vocab, cut.published) == (whole.hidden, whole.vocab, whole.published)
    assert published_formats(cut.name) == published_formats(name)
    assert cut.layers == 5 and cut.mtp_layers == 0 and cut.published_params_b is None


def test_memory_falls_by_the_layers_that_are_gone() -> None:
    setup = EngineSetup()
    one, two, whole = (weights_bytes(resolve_model(f"Mixtral-8x7B{cut}"), setup) for cut in ("[:1]", "[:2]", ""))
    assert whole == pytest.approx(one + 31 * (two - one), rel=1e-9)


@pytest.mark.parametrize("count", [0, 33, 1000])
def test_layers_that_are_not_there_cannot_be_taken(count: int) -> None:
    with pytest.raises(ModelError, match=rf"Mixtral-8x7B has 32 layers, of which the first {count} cannot be taken\."):
        resolve_model(f"Mixtral-8x7B[:{count}]")
