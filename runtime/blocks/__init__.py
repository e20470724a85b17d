"""The parts of which a decoder's layers are assembled: what mixes tokens, and what works on each by itself."""
