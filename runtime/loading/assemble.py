"""How do the tensors of a file become the parts of a model, checked and in our order?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from membound.kernels.arena import Arena
from membound.roofline.models import GroupedQueryAttention, LatentAttention, ModelSpec
from membound.roofline.models.layers import Layer
from membound.roofline.models.recurrent import GatedDeltaNet, Mamba1, Mamba2, Rwkv6, Rwkv7
from membound.runtime.arithmetic import Arithmetic
from membound.runtime.loading.layouts import Layout
from membound.runtime.loading.order import by_head_qkv_order, delta_net_order, gated_qkv_order, head_order, heads_order
from membound.runtime.loading.shapes import extra_shapes, matrix_shapes, vector_shapes
from membound.runtime.loading.store import LayerWeights, Weights, WeightsError

# reads a tensor by its name in the file; raises WeightsError for one that is not there
Read = Callable[[str], Tensor]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Assembler:
    """Makes the weights of one model of what `read` returns for the names that `layout` gives."""

    spec: ModelSpec
    arithmetic: Arithmetic
    layout: Layout
    read: Read
    origin: str
    changes: Callable[[ModelSpec, Layout, Layer], Mapping[str, Change]]

    def weights(self, rope_factors: Tensor | None = None) -> Weights:
        """All of them; raises WeightsError for a tensor that is missing or has another shape."""
        spec, arena = self.spec, Arena()
        with ThreadPoolExecutor(max_workers=2) as pool:
            embed = self._top("embed", (spec.vocab, spec.hidden), torch.bfloat16, arena)
            layers = tuple(pool.map(lambda index: self._layer(index, arena), range(spec.layers)))
            norm = torch.ones(spec.hidden)
            if spec.norm != "unscaled":
                norm = self._top("final_norm", (spec.hidden,), torch.float32, arena) + self.layout.norm_offset
            tied = spec.tie_embeddings
            head = embed if tied else self._top("lm_head", (spec.vocab, spec.hidden), torch.bfloat16, arena)
            shapes = extra_shapes(spec).items()
            extras = {name: self._top(name, shape, torch.float32, arena) for name, shape in shapes}
        return Weights(
            embed=embed,
            layers=layers,
            final_norm=norm,
            lm_head=head,
            origin=self.origin,
            rope_factors=rope_factors,
            arithmetic=self.arithmetic,
            extras=extras,
        )

    def _top(self, part: str, shape: tuple[int, ...], dtype: torch.dtype, arena: Arena) -> Tensor:
        names = self._known(part, self.layout.top_sources(part))
        whole = _joined([self.read(name) for name in names], dtype)
        return arena.like(_checked(self.origin, names, whole, shape), dtype)

    def _layer(self, index: int, arena: Arena) -> LayerWeights:
        layer = self.spec.stack[index]
        prefix = self.layout.layer.format(index)
        changes = self.changes(self.spec, self.layout, layer)
        read = lru_cache(maxsize=4)(self.read)  # one tensor may hold all experts

        def part(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            names = [prefix + source for source in self._known(name, self.layout.sources(name, layer.attention.kind))]
            pieces = [read(source) for source in names]
            kind, _, rest = name.partition(".")
            change = changes.get(name) or changes.get(f"{kind}.{rest.partition('.')[2]}")
            if kind == "experts" and pieces[0].dim() > len(shape):  # one tensor for all experts
                pieces = [piece[int(rest.partition(".")[0])] for piece in pieces]
            whole = _joined([_plain(piece, name) for piece in pieces], dtype)
            whole = whole if change is None else change(whole)
            if name.endswith("norm") and name != "gated_norm":
                whole = whole + self.layout.norm_offset
            return arena.like(_checked(self.origin, names, whole, shape), dtype)

        vectors = vector_shapes(self.spec, layer, self.arithmetic).items()
        matrices = matrix_shapes(layer, self.spec.hidden).items()
        return {name: part(name, shape, torch.float32) for name, shape in vectors} | {
            name: part(name, shape, torch.bfloat16) for name, shape in matrices
        }

    def _known(self, part: str, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise WeightsError(f"{self.origin}: {part} of {self.spec.name} has no known name in files of its family.")
        return names


def safetensors_changes(spec: ModelSpec, layout: Layout, layer: Layer) -> dict[str, Change]:
    """What is done to parts of a Hugging Face layer before they are ours, by the part's name."""
    mixer = layer.attention
    found: dict[str, Change] = {}
    if isinstance(mixer, GroupedQueryAttention):
        found |= _attention_changes(spec, layout, mixer)
    if layout.turned:
        found |= dict.fromkeys(("qkv", "o", "up", "down"), _turned)
    if isinstance(mixer, LatentAttention):
        found |= _latent_changes(layout, mixer)
    if isinstance(mixer, Mamba1 | Mamba2 | GatedDeltaNet):
        found |= {"a": lambda log: -log.exp(), "conv": lambda kernel: kernel.flatten(1)}
    if isinstance(mixer, GatedDeltaNet):
        qkvz, ba = delta_net_order(mixer)
        found |= {"qkvz": _rows(qkvz), "ba": _rows(ba)}
    if isinstance(mixer, Rwkv6 | Rwkv7):
        found |= _rwkv_changes(spec, mixer)
    if spec.architecture == "GptOssForCausalLM":
        found |= {
            "experts.gate_up": lambda packed: _gate_before_up(packed.T),
            "experts.gate_up_bias": _gate_before_up,
            "experts.down": lambda packed: packed.T,
        }
    return found


def gguf_changes(spec: ModelSpec, layout: Layout, layer: Layer) -> dict[str, Change]:
    """What is done to parts of a GGUF's layer before they are ours, by the part's name."""
    mixer = layer.attention
    if isinstance(mixer, GroupedQueryAttention):
        return {"shared_gate": lambda row: row.reshape(1, -1), **_attention_changes(spec, layout, mixer)}
    if isinstance(mixer, LatentAttention):
        return _latent_changes(layout, mixer)
    flat = ("d", "gated_norm", "a") if isinstance(mixer, Mamba2) else ("d",)
    return dict.fromkeys(flat, _flat)


def _latent_changes(layout: Layout, mixer: LatentAttention) -> dict[str, Change]:
    """Only the last elements of each head of q, and of the latent, turn."""
    order = head_order(mixer.qk_rope_head_dim, mixer.qk_rope_head_dim, layout.pairs)
    of_q = heads_order(mixer.heads, mixer.qk_head_dim, mixer.qk_nope_head_dim + order)
    return {"q": _rows(of_q), "q_b": _rows(of_q), "kv_a": _last_rows(order), "q_a_kv_a": _last_rows(order)}


def _attention_changes(spec: ModelSpec, layout: Layout, a: GroupedQueryAttention) -> dict[str, Change]:
    rotated = int(a.head_dim * spec.rotary_fraction) // 2 * 2
    order = head_order(a.head_dim, rotated, layout.pairs)
    if a.output_gate:
        qkv = gated_qkv_order(a, order)
    elif layout.qkv_by_head:
        qkv = by_head_qkv_order(a, order)
    else:
        q, k = (heads_order(count, a.head_dim, order) for count in (a.heads, a.kv_heads))
        v = torch.arange(a.kv_heads * a.value_dim)
        qkv = torch.cat([q, len(q) + k, len(q) + len(k) + v])
    if torch.equal(qkv, torch.arange(len(qkv))):
        return {}
    many = a.qk_norm_over == "heads"
    norms = {
        name: _rows(heads_order(heads if many else 1, a.head_dim, order))
        for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads))
    }
    return {"qkv": _rows(qkv), "qkv_bias": _rows(qkv), **norms}


def _rwkv_changes(spec: ModelSpec, mixer: Rwkv6 | Rwkv7) -> dict[str, Change]:
    """BlinkDL's files keep matrices of low rank as [k, n], and vectors with leading dimensions of 1."""
    shifts: dict[str, Change] = {"shift": lambda t: t.reshape(6, -1), "ffn_shift": lambda t: t.reshape(-1, spec.hidden)}
    if isinstance(mixer, Rwkv6):
        return shifts | {
            "shift_a": lambda t: t.T,
            "shift_b": lambda t: t.transpose(1, 2).flatten(0, 1),  # from [5, rank, hidden]
            "decay": _flat,
            "decay_a": lambda t: t.T,
            "decay_b": lambda t: t.T,
        }
    flat: dict[str, Change] = dict.fromkeys(("decay", "rate", "value", "k_k", "k_a", "r_k"), _flat)
    return shifts | flat | {"low_rank_b": lambda t: t.T}


def _gate_before_up(rows: Tensor) -> Tensor:
    """Rows in which gate and up alternate, gate first and then up."""
    return torch.cat([rows[0::2], rows[1::2]])


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def _rows(order: Tensor) -> Change:
    return lambda rows: rows[order]


def _last_rows(order: Tensor) -> Change:
    """The order of the last rows; those before them stay."""
    return lambda rows: torch.cat([rows[: -len(order)], rows[-len(order) :][order]])


def _plain(piece: Tensor, name: str) -> Tensor:
    """RWKV-7's low ranks lie side by side in our two matrices, so that theirs [k, n] are turned before they are."""
    if name == "low_rank_a":
        return piece.T
    return piece


def _joined(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    pieces = [piece.to(dtype) for piece in pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _checked(origin: str, names: list[str] | tuple[str, ...], tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"{' + '.join(names)} of {origin} has shape {list(tensor.shape)}: its model needs {list(shape)}."
        )
    return tensor
