"""Which link do devices talk over?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, Link
from membound.roofline.shape import Count

# The share of a link's rate that copies between a device and its host reach. nvbandwidth's host_to_device_memcpy_ce
# shows 12.4 GB/s in its README, which is of PCIe 3.0's 16, and 55.6 of PCIe 5.0's 64 in NVIDIA's article on it
# (developer.nvidia.com/blog/?p=115566, as quoted elsewhere; both generations follow from the figures): the middle.
HOST_COPY_SHARE = 0.82

# Into how many groups experts are divided, and of how many a token takes some.
Groups = tuple[int, int]


@dataclass(frozen=True)
class Hop:
    """One stage of a collective: `ranks` devices that exchange `message_bytes` over one kind of link.

    Of messages from one device to the next only this `share` may take it.
    """

    link: Link
    ranks: int
    message_bytes: Count
    shared: bool
    beyond_node: bool
    share: float = 1.0


def hops(
    hardware: HardwareSpec,
    operation: str,
    message_bytes: Count,
    ranks: int,
    copies: Count = 1.0,
    stride: int = 1,
    groups: Groups | None = None,
) -> tuple[Hop, ...]:
    """The stages of a collective: one within a node or domain; beyond it a second one between the nodes.

    NCCL reduces within the node first, so that each device sends only its share of the message over its own network
    link (hierarchical rings and trees). Of the `copies` of a token in an all-to-all one goes to each device, and over
    the network to each node, that they are for by chance; where experts are in `groups`, to those that have one of the
    token's. Where ranks are `stride` devices apart a node holds fewer of
    them. Raises MemboundError where no link reaches so many devices.
    """
    near, sent = hardware.scale_up, message_bytes
    if operation == "alltoall":
        sent = message_bytes * once_each(ranks, copies, groups)
    inside = near.max_devices // stride if near is not None else 0
    if operation == "sendrecv":
        return _from_one_to_the_next(hardware, message_bytes, ranks, stride, inside)
    if near is None or ranks <= inside or inside <= 1 or near.max_devices <= 2 or hardware.scale_out is None:
        link, shared = link_for(hardware, ranks * stride)
        return (Hop(link, ranks, sent, shared, link is hardware.scale_out),)
    nodes = -(-ranks // inside)
    share = message_bytes * once_each(nodes, copies, groups) if operation == "alltoall" else message_bytes / inside
    return (
        Hop(near, inside, sent, near.topology == "host", False),
        Hop(hardware.scale_out, nodes, share, False, True),
    )


def once_each(places: int, copies: Count, groups: Groups | None = None) -> Count:
    """The share of copies that is left where each of so many places gets one of those that are for it by chance."""
    open_to_it = float(places) if groups is None else _places_of(places, *groups)
    return open_to_it * (1.0 - (1.0 - 1.0 / open_to_it) ** copies) / copies


def _places_of(places: int, groups: int, taken: int) -> float:
    """Of places over which groups of experts are spread evenly, those that have one of the groups that a token takes.

    The mean over equally likely groups, where a place has several. Source: DeepSeek-AI, DeepSeek-V3 Technical Report,
    arXiv 2412.19437, section 2.1.2: a token is sent to at most four nodes.
    """
    if places >= groups:
        return places * taken / groups
    elsewhere = groups - groups / places
    nothing_here = math.prod(max(elsewhere - drawn, 0.0) / (groups - drawn) for drawn in range(taken))
    return places * (1.0 - nothing_here)


def host_copies_bytes_per_s(link: Link) -> float:
    """What copies over a link between a device and its host reach."""
    return HOST_COPY_SHARE * link.bandwidth_bytes_per_s


def _from_one_to_the_next(
    hardware: HardwareSpec, message_bytes: Count, ranks: int, stride: int, inside: int
) -> tuple[Hop, ...]:
    """A chain of messages: those between the last rank of a node and the first of the next one leave the node."""
    leaving = (ranks - 1 if inside <= 1 else -(-ranks // inside) - 1) / (ranks - 1)
    found = []
    if leaving < 1.0:
        link, shared = link_for(hardware, 2 * stride)
        found.append(Hop(link, 2, message_bytes, shared, False, 1.0 - leaving))
    if leaving > 0.0:
        link, shared = link_for(hardware, ranks * stride)
        found.append(Hop(link, 2, message_bytes, shared, link is hardware.scale_out, leaving))
    return tuple(found)


def link_for(hardware: HardwareSpec, ranks: float, per_node: float | None = None) -> tuple[Link, bool]:
    """The link that the slowest hop of `ranks` devices crosses, and whether they share one bus through the host.

    Where a node's devices are more than the direct links join (bridged pairs), they talk over the host; beyond the node
    they talk over the network. `per_node` is how many of the ranks are in one node, where that is known. Raises
    MemboundError where the device has no link that reaches so many.
    """
    near, host, far = hardware.scale_up, hardware.host, hardware.scale_out
    inside = per_node is None or per_node >= ranks
    if inside and near is not None and ranks <= near.max_devices:
        return near, near.topology == "host"
    if inside and host is not None and ranks <= max(host.max_devices, 8 if near and near.topology == "pair" else 0):
        return host, True
    if far is not None:
        return far, False
    raise MemboundError(
        f"hardware '{hardware.name}' has no link between {ranks:g} devices; give scale_up, host or scale_out"
    )
