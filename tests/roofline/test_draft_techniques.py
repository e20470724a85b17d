"""What drafters cost that share with their model: its first layers, its lm_head, a copy of it in fewer bits."""

from __future__ import annotations

import pytest

from membound.roofline.errors import MemboundError
from membound.roofline.footprint import Footprint
from membound.roofline.hardware import get_hardware
from membound.roofline.models.files import resolve_model
from membound.roofline.shape import StepShape
from membound.roofline.speculation.draft_models import first_layers
from membound.roofline.speculation.steps import Speculation
from membound.roofline.techniques import (
    DraftModelSpeculation,
    Eagle,
    EngineSetup,
    Medusa,
    SelfSpeculation,
    engine_setup,
)
from membound.roofline.times.known import times_for

MODEL = resolve_model("Llama-3.1-8B")
TIMES = times_for(get_hardware("H100-SXM5"))
SHAPE = StepShape.decode(4.0, 512.0)


def speculation(technique) -> Speculation:
    return Speculation(MODEL, engine_setup((technique,)))


def test_the_models_own_layers_add_no_weights_and_no_cache():
    own = speculation(SelfSpeculation(gamma=2, layers=8))
    assert own.drafter_weights_bytes == 0
    assert Footprint.of(MODEL, own.setup) == Footprint.of(MODEL, own.plain)


def test_a_guess_of_more_layers_costs_more_and_of_all_but_one_almost_a_step():
    costs = [speculation(SelfSpeculation(gamma=2, layers=n)).cost_ratio(TIMES, SHAPE) for n in (4, 16, 31)]
    assert costs == sorted(costs)
    assert 0.8 < costs[-1] < 1.05


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "DeepSeek-V3"])
def test_the_first_layers_are_those_of_the_model(model):
    spec = resolve_model(model)
    assert first_layers(spec, 5).stack == spec.stack[:5]
    with pytest.raises(MemboundError, match="field 'layers' of self_speculation"):
        first_layers(spec, spec.layers)


@pytest.mark.parametrize("head", [Medusa(heads=3, tree_size=6), Eagle(depth=3, tree_size=6)], ids=["medusa", "eagle"])
def test_a_head_that_can_guess_fewer_tokens_drafts_faster(head):
    few = head.model_copy(update={"guessable": 4096})
    assert speculation(few).draft_s(TIMES, SHAPE) < speculation(head).draft_s(TIMES, SHAPE)
    assert speculation(few).drafter_weights_bytes <= speculation(head).drafter_weights_bytes


def test_a_copy_of_the_model_in_fewer_bits_drafts_faster():
    def cost(format):
        fields = {"draft": "Llama-3.1-8B", "gamma": 2, "format": format}
        return speculation(DraftModelSpeculation(**fields)).cost_ratio(TIMES, SHAPE)

    assert cost("int4") < cost("int8") < cost(None)
    with pytest.raises(ValueError, match="int5x"):
        DraftModelSpeculation(draft="Llama-3.1-8B", format="int5x")


def test_only_typical_acceptance_is_lossy():
    assert Medusa.lossless and Medusa().lossless and Eagle(acceptance="exact").lossless
    assert not Medusa(acceptance="typical").lossless
    drafts = Eagle(acceptance="typical", adaptive=True).apply(EngineSetup()).drafts
    assert drafts is not None and drafts.typical and drafts.adaptive
