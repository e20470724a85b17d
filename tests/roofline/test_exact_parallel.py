"""Is a division over devices that leaves every token as one device gives it priced as what it exchanges?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.models import get_model
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup

PLAIN = EngineSetup()


@given(tp=st.sampled_from([2, 4, 8]), batch=st.integers(1, 256), context=st.integers(1, 8192))
def test_an_exact_division_moves_the_inputs_too_and_computes_the_same(tp: int, batch: int, context: int) -> None:
    model, shape = get_model("Llama-3.1-8B"), StepShape.decode(float(batch), float(context))
    summed, exact = (
        step_operators(model, replace(PLAIN, parallel=Parallelism(tp=tp, exact=exact)), shape, 2.0)
        for exact in (False, True)
    )
    assert sum(one.flops * one.calls for one in exact) == sum(one.flops * one.calls for one in summed)
    moved, before = (sum(one.link_bytes * one.calls for one in found) for found in (exact, summed))
    inner = 4096 + 14336
    share = batch * 2.0 * (tp - 1) / tp * model.layers
    assert moved - before == pytest.approx(share * (inner - 2 * model.hidden))


def test_an_exact_division_is_refused_where_it_would_not_be_one() -> None:
    with pytest.raises(ValidationError, match="tp is 1"):
        Parallelism(exact=True)
    with pytest.raises(MemboundError, match="sums its experts over devices"):
        check_parallel(get_model("Mixtral-8x7B"), replace(PLAIN, parallel=Parallelism(tp=2, exact=True)))
