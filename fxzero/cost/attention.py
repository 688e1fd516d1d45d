"""FLOPs of fused attention: by torch's formulas, and what of them a CPU computes.

Torch's kernel for CPUs goes through the keys in blocks of 512. Where attention is causal it leaves
out the blocks that a query must not see, and masks what is left: of T queries and T keys it
computes (1 + 512 / T) / 2, and all of 512 and fewer.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from fxzero._compat import hinted

_aten = torch.ops.aten
_NUM_TENSORS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 4,
}
"""Attention that torch counts no FLOPs of, and with how many tensors its arguments begin:
(gradient,) query, key and value."""
_BLOCK = 512
"""Keys that the kernel takes at a time (torch 2.11 to 2.13)."""


def attention_flops(*shapes: torch.Size) -> float:
    """By torch's formulas, which count what a causal mask hides: (gradient,) query, key, value."""
    if len(shapes) == 4:
        return float(sdpa_backward_flop_count(*shapes))
    return float(sdpa_flop_count(*shapes))


def computed_share(num_queries: int, num_keys: int, *, is_causal: bool) -> float:
    """Which share of its FLOPs a CPU computes. Query i sees keys to i, or all that there are."""
    if not (is_causal and num_queries and num_keys):
        return 1.0
    within = min(num_queries, num_keys)
    seen = min(max(_BLOCK, (within + _BLOCK) / 2), num_keys)
    return (within * seen / num_keys + num_queries - within) / num_queries


def is_cpu_attention(node: fx.Node) -> bool:
    """Whether a node is the kernel for CPUs, or its gradient."""
    return getattr(node.target, "overloadpacket", None) in _NUM_TENSORS


def flops_on_cpu(node: fx.Node) -> float:
    """FLOPs of the kernel for CPUs, or of its gradient."""
    return attention_flops(*_shapes(node))


def share_on_cpu(node: fx.Node) -> float:
    """Which share of these it computes."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    position = next(i for i, argument in enumerate(arguments) if argument.name == "is_causal")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("is_causal")
    *_, query, key, _ = _shapes(node)
    return computed_share(query[-2], key[-2], is_causal=bool(given))


def _shapes(node: fx.Node) -> list[torch.Size]:
    count = _NUM_TENSORS[node.target.overloadpacket]  # type: ignore[union-attr]
    tensors = [cast(fx.Node, argument).meta["val"] for argument in node.args[:count]]
    return [hinted(tensor).shape for tensor in tensors]
