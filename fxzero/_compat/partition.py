"""The cut of a joint graph into forward and backward, as AOTAutograd wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fxzero._compat.nodes import copy_node, set_meta


def set_side(node: fx.Node, *, backward: bool) -> None:
    """Fix the side of the cut on which `extract_forward_backward` puts a node."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def extract_forward_backward(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    num_forward_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph whose nodes carry `set_side` marks, in AOTAutograd's conventions.

    What is saved is decided by the caller. The extraction keeps the order of nodes.
    """
    from torch._functorch import partitioners

    original = partitioners._extract_graph_with_inputs_outputs
    partitioners._extract_graph_with_inputs_outputs = _Extraction(original)
    try:
        sides = partitioners._extract_fwd_bwd_modules(
            joint, saved, saved_symbols, num_fwd_outputs=num_forward_outputs
        )
    finally:
        partitioners._extract_graph_with_inputs_outputs = original
    for side in sides:
        _print_for_readers(side)
    return sides


class _Extraction:
    """One side of a joint graph that carries `set_side` marks, as a graph of its own.

    Does the work of torch's ``_extract_graph_with_inputs_outputs`` without walking through every
    node's arguments, and once for backward, which torch extracts twice: of 96 layers a quarter of
    the time. What it does not know it leaves to torch.
    """

    def __init__(self, original: Callable[..., fx.Graph]) -> None:
        self.original = original
        self.found: dict[Any, fx.Graph] = {}

    def __call__(
        self,
        joint: fx.Graph,
        inputs: list[fx.Node],
        outputs: list[Any],
        descriptions: list[Any],
        subgraph: str | None = None,
        **settings: Any,
    ) -> fx.Graph:
        key = (subgraph, tuple(inputs), tuple(outputs))
        if key not in self.found:
            graph = self._extract(joint, inputs, outputs, f"must_be_in_{subgraph}")
            if graph is None:
                return self.original(joint, inputs, outputs, descriptions, subgraph, **settings)
            self.found[key] = graph
        graph = self.found[key]
        end = next(iter(reversed(graph.nodes)))
        end.meta["desc"] = descriptions
        end.meta["output_stack_traces"] = [
            v.meta.get("stack_trace") if isinstance(v, fx.Node) else None for v in end.args[0]
        ]
        return graph

    @staticmethod
    def _extract(
        joint: fx.Graph, inputs: list[fx.Node], outputs: list[Any], side: str
    ) -> fx.Graph | None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            set_meta(copies[node], node.meta)
        for node in joint.nodes:
            if node in copies or node.op not in ("call_function", "get_attr"):
                continue
            if node.op == "call_function" and node.meta.get("partitioner_tag") != side:
                continue
            if all(source in copies for source in node.all_input_nodes):
                copies[node] = copy_node(graph, node, copies.__getitem__)
        if any(isinstance(value, fx.Node) and value not in copies for value in outputs):
            return None
        graph.output(tuple(copies[v] if isinstance(v, fx.Node) else v for v in outputs))
        graph.eliminate_dead_code()
        return graph


def _print_for_readers(module: fx.GraphModule) -> None:
    """Write a graph as text only if somebody reads it: AOTAutograd does so whenever it has one."""
    from torch._logging import _internal as logs

    original = module.print_readable

    def print_readable(*args: Any, **settings: Any) -> str:
        printed = settings.get("print_output", not args)
        kept = any(getattr(h, "root_dir", "") is not None for h in logs.trace_log.handlers)
        if printed or kept or logs.log_state.is_artifact_enabled("aot_graphs"):
            return original(*args, **settings)
        return ""

    module.print_readable = print_readable  # type: ignore[method-assign]
