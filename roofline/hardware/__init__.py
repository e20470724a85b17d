"""What is a device, and which ones does membound know?"""

from membound.roofline.hardware.devices import (
    LOCAL,
    LOCAL_GPU,
    catalog,
    get_hardware,
    hardware_of,
    is_local,
    kept_as,
    kept_in,
    local_hardware,
    parse_hardware,
    read_hardware,
    user_hardware,
    user_hardware_folder,
)
from membound.roofline.hardware.names import normalised
from membound.roofline.hardware.spec import DTYPES, HardwareSpec, Link, Price

__all__ = [
    "DTYPES",
    "LOCAL",
    "LOCAL_GPU",
    "HardwareSpec",
    "Link",
    "Price",
    "catalog",
    "get_hardware",
    "hardware_of",
    "is_local",
    "kept_as",
    "kept_in",
    "local_hardware",
    "normalised",
    "parse_hardware",
    "read_hardware",
    "user_hardware",
    "user_hardware_folder",
]
