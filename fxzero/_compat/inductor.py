"""What Inductor can lower, and a region lowered by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions after which Inductor can lower a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return {
        op: decomposition
        for op, decomposition in select_decomp_table().items()
        # Random numbers are torch's own, those of an eager run.
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
    }


def inductor_compile(module: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile one region: a function of a list of inputs, which it empties.

    All outputs are user-visible, so that their strides are those of the graph.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    output = next(iter(reversed(module.graph.nodes)))
    outputs = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return compile_fx_inner(module, inputs)
