"""What layers with a window see of sequences in lockstep is the sum over each of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from membound.simulator.scheduling.decoders import Decoders
from membound.simulator.scheduling.reach import Reach
from membound.simulator.scheduling.request import Request, Sequence

# Sequences join with so many tokens, leave in some order, or the clock goes on.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 60)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("steps"), st.integers(1, 30)),
    ),
    max_size=60,
)


@given(events=EVENTS, window=st.integers(1, 50))
def test_the_sum_and_its_growth_are_those_of_the_sequences(events, window):
    reach, clock, standings = Reach(window), 5, []
    for kind, amount in events:
        if kind == "join":
            standings.append(amount - clock)
            reach.add(amount - clock, clock)
        elif kind == "steps":
            clock += amount
            reach.advance(clock)
        elif standings:
            reach.remove(standings.pop(amount % len(standings)), clock)

        def seen(at: int) -> int:
            return sum(min(standing + at, window) for standing in standings)

        assert reach.tokens(clock) == seen(clock)
        even = min(reach.even_steps(clock), 100)
        assert even >= 1
        for later in range(even):
            assert seen(clock + later) == seen(clock) + reach.short * later
        if even < 100:
            assert seen(clock + even) < seen(clock) + reach.short * even, "no fewer steps than there are"


def test_of_several_windows_the_next_that_is_filled_ends_even_steps():
    decoders = Decoders(16, windows=(10, 40))
    for number, tokens in enumerate((4, 25)):
        decoders.add(Sequence(Request(number, 0.0, tokens, 99)))
    assert decoders.seen == (14, 29) and decoders.growing == (1, 2)
    assert decoders.even_steps(99) == 7 and decoders.even_steps(3) == 3
