"""What Inductor can lower, and a region lowered by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
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


def inductor_wrapper(module: fx.GraphModule, inputs: list[Any]) -> str:
    """The Python by which Inductor would call the kernels of a region, none of which is compiled.

    It takes a fiftieth to a half of what compiling does, most of it in the first call of a process.
    Inductor asks a C++ compiler all the same which vector units it knows, once on a machine.
    """
    import torch._inductor.config as inductor
    from torch._inductor.graph import GraphLowering

    written: list[str] = []
    thread = threading.get_ident()
    compile_to_module = GraphLowering.compile_to_module

    def write(self: GraphLowering) -> Any:
        if threading.get_ident() != thread:  # somebody else is compiling meanwhile
            return compile_to_module(self)
        text, _ = self.codegen()
        written.append(text.value)
        return SimpleNamespace(call=_is_not_compiled)

    # What was compiled before would be found, and nothing written.
    settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp_wrapper": False}
    with inductor.patch(settings):
        GraphLowering.compile_to_module = write
        try:
            inductor_compile(module, inputs)
        finally:
            GraphLowering.compile_to_module = compile_to_module
    return written[-1]


def _is_not_compiled(_: Any) -> Any:
    raise AssertionError("this was written to be read")


def probe_vector_instructions() -> None:
    """Let Inductor find out what this CPU's vector units are, which it does once in a process.

    It compiles a small program for each kind, and keeps them on disk. Known from torch 2.11 on.
    """
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.pick_vec_isa()


def options_for_one_kernel() -> dict[str, Any]:
    """Options of Inductor under which one small function is compiled soonest.

    In this process, where a compiler that fails says more; and without headers compiled beforehand,
    which many kernels share and one would wait for (torch 2.11 may not know of that).
    """
    import torch._inductor.config as inductor

    wanted = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    return {name: value for name, value in wanted.items() if hasattr(inductor, name)}
