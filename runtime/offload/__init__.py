"""Experts that a device has no room for: they lie on the host or on the disk, and it keeps some of them."""
