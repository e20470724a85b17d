"""Which link do devices talk over?"""

from __future__ import annotations

from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, Link


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
