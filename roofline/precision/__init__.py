"""How many bytes does a number take, and what are the formats called?"""

from membound.roofline.precision.number_formats import (
    GGML_BLOCKS,
    GGML_MIXES,
    PRECISIONS,
    Precision,
    Role,
    get_precision,
    integer,
    sparse24,
)

__all__ = ["GGML_BLOCKS", "GGML_MIXES", "PRECISIONS", "Precision", "Role", "get_precision", "integer", "sparse24"]
