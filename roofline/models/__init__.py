"""What is a model, as far as its cost is concerned, and which ones does membound know?"""

from membound.roofline.models.attention import GroupedQueryAttention, LatentAttention, NoMixer, SparseIndexer
from membound.roofline.models.base import LinearShape, ModelError, TokenMixer
from membound.roofline.models.catalog import Catalog, catalog, get_model
from membound.roofline.models.checkpoint import Checkpoint
from membound.roofline.models.ffn import ChannelMix, DenseFfn, FeedForward, GatedFfn, MoeFfn, NoFfn
from membound.roofline.models.layers import Attention, Ffn, Layer, LayerGroup, LayerOverride
from membound.roofline.models.names import normalise_name
from membound.roofline.models.recurrent import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Rwkv6,
    Rwkv7,
    ShortConv,
)
from membound.roofline.models.side_by_side import ParallelMixers
from membound.roofline.models.spec import Llama3RopeScaling, ModelSpec, OtherRopeScaling

__all__ = [
    "Attention",
    "Catalog",
    "ChannelMix",
    "Checkpoint",
    "DenseFfn",
    "FeedForward",
    "Ffn",
    "GatedDeltaNet",
    "GatedFfn",
    "GroupedQueryAttention",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LayerGroup",
    "LayerOverride",
    "LightningAttention",
    "LinearShape",
    "Llama3RopeScaling",
    "Mamba1",
    "Mamba2",
    "ModelError",
    "ModelSpec",
    "MoeFfn",
    "NoFfn",
    "NoMixer",
    "OtherRopeScaling",
    "ParallelMixers",
    "Rwkv6",
    "Rwkv7",
    "ShortConv",
    "SparseIndexer",
    "TokenMixer",
    "catalog",
    "get_model",
    "normalise_name",
]
