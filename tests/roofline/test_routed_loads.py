"""What a benchmark's made-up routers send to the rank that it times."""

from __future__ import annotations

import pytest

from membound.roofline.validation.routed_loads import DEEPSEEK_GROUPS, Groups, drawn, even

SHAPES = [(8, 2), (64, 6), (128, 8), (256, 8)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 32, 512])
def test_a_single_rank_has_every_pair_and_no_more_experts_than_there_are(experts: int, top_k: int, tokens: int) -> None:
    for load in (even(experts, top_k, 1, tokens), drawn(experts, top_k, 1, tokens, 1.01)):
        assert load.pairs == pytest.approx(tokens * top_k)
        assert 1 <= load.active <= min(experts, tokens * top_k)


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.01, 1.2])
def test_the_timed_rank_has_at_least_its_share_of_a_power_law(experts: int, top_k: int, exponent: float) -> None:
    load = drawn(experts, top_k, 8, 512, exponent)
    assert 512 * top_k / 8 <= load.pairs <= 512 * min(top_k, experts / 8)
    assert 1 <= load.least_active <= load.active <= experts / 8


def test_a_router_that_chooses_all_groups_is_one_without_groups() -> None:
    for ranks in (1, 2, 4, 8):
        for tokens in (32, 512):
            assert even(256, 8, ranks, tokens, Groups(8, 8)) == even(256, 8, ranks, tokens)


def test_half_of_the_groups_are_half_of_the_experts_and_the_first_rank_gets_what_the_others_lose() -> None:
    assert even(256, 8, 1, 512, DEEPSEEK_GROUPS) == (512 * 8, 128, 128)
    assert even(256, 8, 8, 512, DEEPSEEK_GROUPS) == (512 * (1 + 4), 32, 32)
