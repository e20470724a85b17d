"""Drafters that compute: what proposes tokens from tensors, and how its small heads are trained."""
