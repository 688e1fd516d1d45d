"""What Inductor can lower, and a region lowered by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions after which Inductor can lower a graph."""
    import torch._inductor.lowering  # decompositions ask for it, and do not import it
    from torch._inductor.decomposition import select_decomp_table

    return {
        op: decomposition
        for op, decomposition in select_decomp_table().items()
        # Random numbers are torch's own, those of an eager run.
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ())
    }


def inductor_compile(module: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile one region: a function of a list of inputs, which it empties.

    All outputs are user-visible, so that their strides are those of the graph. On CPU values in
    between have them too: in another layout sums are made in another order, so that what backward
    repeats would not be what forward computed, bit by bit. It costs nothing there: oneDNN has
    layouts of its own.
    """
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import compile_fx_inner

    output = next(iter(reversed(module.graph.nodes)))
    outputs = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    on_cpu = all(v.device.type == "cpu" for v in inputs if isinstance(v, torch.Tensor))
    with inductor.patch(layout_optimization=inductor.layout_optimization and not on_cpu):
        return compile_fx_inner(module, inputs)
