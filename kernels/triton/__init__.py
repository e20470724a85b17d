"""Triton kernels for the GPU; each file is one operation: its kernel, its plain PyTorch meaning, the bytes it moves."""
