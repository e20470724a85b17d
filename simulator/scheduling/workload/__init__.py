"""Who asks what, and when: arrivals, lengths, conversations and recorded traces."""

from membound.simulator.scheduling.workload.requests import (
    RequestColumns,
    request_columns,
    request_stream,
    requests_for,
)

__all__ = ["RequestColumns", "request_columns", "request_stream", "requests_for"]
