"""Let a product that is the gradient of one micro-step be added where it is computed.

    dw = mm(g, x); t = dw.t()                gT, xT = g.t(), x.t()
    total_1 = total.add_(t)             →    total_1 = total.addmm_(xT, gT)

The product is then never written to memory, and not read again; the sums round in another order,
as in Megatron-LM's gradient accumulation fusion. What `outline` has put into pieces stays: the
products of a pipeline's stages are alone (see `split_stages`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxzero.graph import Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.passes.base import Context, Door, Notes, Pass

_aten = torch.ops.aten


def product_of(term: fx.Node) -> tuple[fx.Node, bool] | None:
    """The product that a gradient is, and whether it is transposed; None if it is none, or if
    somebody else reads it."""
    transposed = False
    while term.target is _aten.permute.default and len(term.users) == 1:
        order = term.args[1]
        if order not in ([0, 1], [1, 0]):
            return None
        transposed ^= order == [1, 0]
        term = term.all_input_nodes[0]
    if term.target is not _aten.mm.default or len(term.users) != 1:
        return None
    return term, transposed


def multiply_into(graph: StepGraph, addition: fx.Node) -> bool:
    """Make one operator of a product and its addition, where the product was; say whether."""
    if addition.target is not _aten.add_.Tensor or addition.kwargs:
        return False
    total, term = addition.args
    if not isinstance(total, fx.Node) or not isinstance(term, fx.Node) or len(total.users) != 1:
        return False
    found = product_of(term)
    if found is None or term.meta["val"].dtype != total.meta["val"].dtype:
        return False
    product, transposed = found
    if product < total:  # the sum so far comes later
        return False
    left, right = product.args
    with graph.graph.inserting_before(product), graph.made_for(product):
        if transposed:
            stamp = stamp_of(product)
            order = [1, 0]
            left, right = (
                graph.call(_aten.permute.default, (one, order), stamp=stamp)
                for one in (right, left)
            )
        into = graph.call(_aten.addmm_.default, (total, left, right), stamp=stamp_of(addition))
    addition.replace_all_uses_with(into)
    graph.graph.erase_node(addition)
    while term is not product:
        view, term = term, term.all_input_nodes[0]
        graph.graph.erase_node(view)
    graph.graph.erase_node(product)
    return True


@dataclass(frozen=True)
class MultiplyIntoSums(Pass):
    """Add up products where they are computed."""

    name: ClassVar[str] = "multiply_into_sums"
    doors: ClassVar[frozenset[Door]] = frozenset({Door.STEP})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        sums = list(graph.nodes(role=Role.ACCUMULATE))
        return Notes(products=sum(multiply_into(graph, node) for node in sums))
