"""Who asks what, and when: arrivals, lengths, conversations and recorded traces."""

from membound.simulator.scheduling.workload.requests import (
    RequestColumns,
    longest_request,
    request_columns,
    request_stream,
    requests_for,
)

__all__ = ["RequestColumns", "longest_request", "request_columns", "request_stream", "requests_for"]
