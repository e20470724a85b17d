"""Prompts in one process and outputs in another, with the KV cache handed over between them."""
