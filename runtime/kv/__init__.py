"""Which KV stores are there besides the plain one, which keeps K and V of all tokens as the kernels do?"""
