"""Which devices can be chosen on a page? A user's own stand before those of the catalog."""

from __future__ import annotations

from pathlib import Path

from membound.app.i18n import Translate
from membound.app.views.session import this_machine
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import LOCAL, HardwareSpec, catalog, is_local, user_hardware

# What the drivers of NVIDIA and AMD put there; to ask torch would take a second, and memory of the GPU.
GPU_FILES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/kfd"))


def known_devices() -> dict[str, HardwareSpec]:
    """The user's own devices by name, then those of the catalog."""
    try:
        own = user_hardware()
    except MemboundError:  # a file of theirs that is wrong is told to who asks for it by its name
        own = {}
    return {**own, **catalog()}


def device_names() -> list[str]:
    """This machine, the user's own devices, and those of the catalog."""
    return [LOCAL, *known_devices()]


def device_title(name: str, t: Translate) -> str:
    """A device as a list names it."""
    if is_local(name):
        return t("choice.this_machine")
    return name if name in catalog() else t("choice.own_device", device=name)


def has_gpu() -> bool:
    """Whether this machine has a GPU that could be measured, as far as can be seen without a driver's library."""
    machine = this_machine()
    return (machine is not None and machine.kind == "gpu") or any(path.exists() for path in GPU_FILES)
