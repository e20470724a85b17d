"""The operations of a decoder in C++, for the processor at hand."""
