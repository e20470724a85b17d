"""What can this machine do? Micro-benchmarks, and what keeps them honest."""
