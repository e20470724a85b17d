"""Which weights stay on a device beside the engine that is asked for next?

Decoders stay loaded, so that engines that are measured in turn are not packed again. A CPU's memory, of which the
system gives pages when they are written, has room for all; a GPU gives what is asked for at once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from membound.roofline.errors import MemboundError
from membound.roofline.scenario import Scenario
from membound.runtime.decoders import DeviceModels
from membound.simulator.scheduling.kv_memory import KvMemory


def cache_room(
    decoders: DeviceModels, scenario: Scenario, memory_bytes: float, room_of: Callable[[float], KvMemory]
) -> KvMemory:
    """The KV memory of the scenario's engine, by `room_of` a device of `memory_bytes`, as if it were alone there.

    On a GPU other decoders stay only where it is the same beside their weights. Raises what `room_of` raises.
    """
    alone = room_of(memory_bytes)
    if decoders.device.startswith("cpu"):
        return alone
    with suppress(MemboundError):
        if room_of(memory_bytes - decoders.bytes_beside(scenario)) == alone:
            return alone
    decoders.keep_only(scenario)
    return alone
