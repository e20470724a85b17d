"""Which links do the devices of each kind of parallelism talk over?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.hardware.links import hops
from membound.roofline.models import get_model
from membound.roofline.operators import Operator, message
from membound.roofline.parallel import Parallelism
from membound.roofline.shape import StepShape
from membound.roofline.step import step_operators
from membound.roofline.techniques import EngineSetup
from membound.roofline.times.kernels import KernelTimes

H100 = get_hardware("H100-SXM5")  # nodes of 8
LLAMA = get_model("Llama-3.1-70B")


def sent(shape: StepShape, name: str, **degrees: int) -> Operator:
    setup = replace(EngineSetup(), parallel=Parallelism(**degrees))
    return next(op for op in step_operators(LLAMA, setup, shape, 2.0) if op.name == name)


def links(hardware: HardwareSpec, op: Operator) -> dict[str, float]:
    """By kind of link the share of the messages that pass it."""
    one = op.collective
    assert one is not None
    found = hops(hardware, one.operation, one.message_bytes, one.ranks, one.copies, one.stride)
    return {hop.link.kind: hop.share for hop in found}


@pytest.mark.parametrize(
    ("tp", "pp", "leaving"),
    [(8, 2, 1.0), (4, 2, 0.0), (4, 4, 1 / 3), (2, 8, 1 / 7), (2, 4, 0.0), (1, 8, 0.0), (1, 16, 1 / 15), (8, 4, 1.0)],
)
def test_stages_of_different_nodes_talk_over_the_network(tp, pp, leaving):
    found = links(H100, sent(StepShape.decode(32.0, 1000.0), "next_stage", tp=tp, pp=pp))
    assert found.get(H100.scale_out.kind, 0.0) == pytest.approx(leaving)
    assert found.get(H100.scale_up.kind, 0.0) == pytest.approx(1 - leaving)


@pytest.mark.parametrize(("tp", "cp", "beyond"), [(8, 2, True), (4, 2, False), (2, 4, False), (1, 8, False)])
def test_a_context_that_is_shared_by_nodes_is_gathered_over_the_network(tp, cp, beyond):
    found = links(H100, sent(StepShape.prefill(1.0, 8192.0), "gather_keys", tp=tp, cp=cp))
    assert (H100.scale_out.kind in found) == beyond and (H100.scale_up.kind in found) != beyond


def test_a_rack_of_many_direct_links_has_no_network_between_its_stages():
    found = links(get_hardware("GB200"), sent(StepShape.decode(32.0, 1000.0), "next_stage", tp=8, pp=4))
    assert list(found) == [get_hardware("GB200").scale_up.kind]


@given(ranks=st.integers(2, 32), stride=st.integers(1, 16), sent_bytes=st.floats(1e6, 1e9))
@settings(max_examples=60)
@pytest.mark.parametrize("operation", ["allreduce", "allgather", "alltoall", "sendrecv"])
def test_devices_that_are_further_apart_never_send_sooner(operation, ranks, stride, sent_bytes):
    """Beside latencies, which grow with the devices of a node."""
    times = KernelTimes(H100)
    near = times.of(message("near", 1, operation, sent_bytes, ranks), 0.0).link_s
    apart = times.of(message("apart", 1, operation, sent_bytes, ranks, stride=stride), 0.0).link_s
    assert apart >= near * (1 - 1e-9)
    if ranks * stride <= 8:
        assert apart == near


def test_a_device_without_a_network_has_no_stage_elsewhere():
    hardware = get_hardware("RTX-4090")
    inside = sent(StepShape.decode(1.0, 100.0), "next_stage", tp=4, pp=2)
    assert len(links(hardware, inside)) == 1
    with pytest.raises(MemboundError, match="has no link between 16 devices"):
        links(hardware, sent(StepShape.decode(1.0, 100.0), "next_stage", tp=8, pp=2))
