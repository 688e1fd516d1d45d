"""AOTAutograd: joint graphs of Dynamo's graphs, and of functions inside of a compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxzero._compat.fakes import (
    let_fakes_have_dtypes_of_real_ones,
    let_fakes_say_their_device_at_once,
)
from fxzero.errors import CaptureError


def aot_compile(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Run AOTAutograd on Dynamo's graph, with our partitioner and compilers."""
    from torch._dynamo.backends.common import aot_autograd

    _mend_fakes()
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decompositions,
    )
    return compiler(module, inputs)


def _mend_fakes() -> None:
    """What every trace asks of fake tensors is answered rightly, and at once."""
    let_fakes_have_dtypes_of_real_ones()
    let_fakes_say_their_device_at_once()


class _Captured(Exception):  # noqa: N818 - a way out, not an error
    """A joint graph, taken out of AOTAutograd before it goes on."""


def capture_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    decompositions: dict[Any, Callable[..., Any]],
) -> tuple[fx.GraphModule, int]:
    """AOTAutograd's joint graph of Dynamo's graph, and how many of its outputs are forward's.

    The caller runs it: nothing is partitioned, and no runtime is put around it.
    """

    def take(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        raise _Captured(joint, num_fwd_outputs)

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        raise CaptureError("no parameter that requires a gradient goes into the loss")

    try:
        aot_compile(
            module,
            inputs,
            forward=compiler,
            backward=compiler,
            inference=compiler,
            partition=take,
            decompositions=decompositions,
        )
    except _Captured as captured:
        joint, num_forward_outputs = captured.args
        return joint, num_forward_outputs
    raise AssertionError("AOTAutograd never asked for a partition")


def interpreted(module: fx.GraphModule) -> Callable[..., Any]:
    """A module as a function that hands its nodes' provenance on to what is traced of them."""

    def run(*args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(module).run(*args)

    return run


def trace_joint(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: dict[Any, Callable[..., Any]],
    joint: bool,
    fake_mode: Any,
) -> fx.GraphModule | None:
    """The joint graph (or the forward alone) of a function of fake tensors, as AOTAutograd has it.

    Returns:
        A graph of the inputs and the outputs' gradients that returns the outputs, then the
        inputs' gradients, None where there is none; in its module, which holds the constants
        that it reads. None if AOTAutograd cannot: above all, if the function changes its
        inputs, or returns views of them.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple

    _mend_fakes()
    with fresh_tracing_context(fake_mode):
        try:
            traced = aot_export_joint_simple(
                function, tuple(inputs), trace_joint=joint, decompositions=decompositions
            )
        except RuntimeError:  # a real error comes up again when the whole graph is traced
            return None
    return traced


def trace_function(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: dict[Any, Callable[..., Any]],
    joint: bool,
    fake_mode: Any,
) -> fx.GraphModule | None:
    """What `trace_joint` returns, traced the way models are: exporting takes more apart."""
    from torch._functorch.aot_autograd import aot_function

    _mend_fakes()

    def take(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        raise _Captured(graph)

    options = {"fw_compiler": take, "bw_compiler": take, "decompositions": decompositions}
    with fresh_tracing_context(fake_mode), torch.set_grad_enabled(joint):
        try:
            aot_function(function, partition_fn=take, **options)(*inputs)
        except _Captured as captured:
            traced: fx.GraphModule = captured.args[0]
            traced.graph.set_codegen(fx.graph.CodeGen())  # inputs one by one
            return traced
        except RuntimeError:
            return None
    return None


def tracing_fake_mode() -> Any:
    """The mode in which AOTAutograd will trace the graph that Dynamo is compiling."""
    context = torch._guards.TracingContext.try_get()
    return context.fake_mode if context is not None else None


@contextlib.contextmanager
def fresh_tracing_context(fake_mode: Any) -> Iterator[None]:
    """Compile something inside a compilation without disturbing the outer one's metadata."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def forget_donated_buffers() -> None:
    """Tell AOTAutograd that we free saved tensors ourselves.

    It would otherwise refuse ``retain_graph=True`` on behalf of Inductor, which reuses
    their memory without asking; `release_saved` asks.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
