"""Triton kernels for hot operators, one family per file.

Each is a function of tensors, differentiable where that makes sense, an operator
``torch.ops.fxzero.…`` underneath, and a reference in plain torch beside it. They may be called
from a model; `fxzero.passes.lower_kernels` puts them into step graphs where they win.
"""

from fxzero.kernels.activations import geglu, gelu, swiglu
from fxzero.kernels.attention import flash_attention, flash_attention_dropout_mask
from fxzero.kernels.chunked_cross_entropy import linear_cross_entropy
from fxzero.kernels.cross_entropy import softmax_cross_entropy
from fxzero.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fxzero.kernels.optimizers import adamw_
from fxzero.kernels.packing import cast_pack, packed_offsets, unpack, unpack_into
from fxzero.kernels.quantize import dequantize_blockwise, quantize_blockwise
from fxzero.kernels.rotary_embedding import rotary

__all__ = [
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "cast_pack",
    "dequantize_blockwise",
    "flash_attention",
    "flash_attention_dropout_mask",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "packed_offsets",
    "quantize_blockwise",
    "rms_norm",
    "rotary",
    "softmax_cross_entropy",
    "swiglu",
    "unpack",
    "unpack_into",
]
