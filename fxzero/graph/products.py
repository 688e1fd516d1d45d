"""Refuse products of unequal dtypes: tensors without memory multiply what real ones do not.

A graph is traced on fake tensors, whose products take any two dtypes and give the first one's;
PyTorch's kernels refuse them when the step runs, and a step that is only looked at never runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxzero.errors import CaptureError
from fxzero.graph.node_text import describe_value, source_line

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
"""Those that fake tensors do not refuse themselves (torch 2.11 to 2.13)."""


def refuse_mixed_products(graph: fx.Graph) -> None:
    """See that the factors of every product have one dtype.

    Raises:
        CaptureError: they have several; the message has the line.
    """
    for node in graph.nodes:  # in order: the first one is where the dtypes meet, and no gradient
        if node.target not in _PRODUCTS:
            continue
        values = [argument.meta.get("val") for argument in node.all_input_nodes]
        terms = [value for value in values if isinstance(value, Tensor)]
        if len({value.dtype for value in terms}) > 1:
            line = source_line(node)
            raise CaptureError(
                f"{node.name} ({node.target}){f' at {line}' if line else ''} is of "
                f"{', '.join(map(describe_value, terms))}: PyTorch multiplies, and adds a bias, in "
                "one dtype. Give the model inputs and parameters of one, or cast in its forward."
            )
