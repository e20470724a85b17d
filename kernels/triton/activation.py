"""What does a kernel give to the next linear layer: halves, or quantized rows with a scale each?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ActivationFormat = Literal["int8", "fp8"]
STORED: dict[ActivationFormat, torch.dtype] = {"int8": torch.int8, "fp8": torch.uint8}
LARGEST: dict[ActivationFormat, float] = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class QuantizedRows:
    """Activations [tokens, width] as data * scale[token]; `data` is int8, or e4m3 in uint8; `scale` [tokens] fp32.

    Where `scale` is [1], it is that of all tokens.
    """

    format: ActivationFormat
    data: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, format: ActivationFormat, tokens: int, width: int, device: torch.device) -> QuantizedRows:
        data = torch.empty(tokens, width, dtype=STORED[format], device=device)
        return cls(format, data, torch.empty(tokens, dtype=torch.float32, device=device))

    @classmethod
    def of(cls, rows: Tensor, format: ActivationFormat) -> QuantizedRows:
        """Rows [tokens, width] rounded to nearest, in plain PyTorch: what `round_rows` must agree with."""
        scale = rows.float().abs().amax(-1) / LARGEST[format]
        scaled = rows.float() / torch.where(scale > 0, scale, 1.0)[:, None]
        if format == "int8":
            return cls(format, (scaled + 0.5).floor().to(torch.int8), scale)
        return cls(format, scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale)

    @classmethod
    def of_step(cls, rows: Tensor, format: ActivationFormat) -> QuantizedRows:
        """The same with one scale: what `round_step` must agree with."""
        whole = cls.of(rows.reshape(1, -1), format)
        return cls(format, whole.data.view(rows.shape), whole.scale)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        """The rows in fp32."""
        data = self.data if self.format == "int8" else self.data.view(torch.float8_e4m3fn)
        return data.float() * self.scale[:, None]
