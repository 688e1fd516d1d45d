"""Replay a whole step as one CUDA graph, so that Python and launches cost nothing.

A CUDA graph repeats kernels on the addresses that it was captured with. Parameters,
buffers and optimizer state stay where they are; the batch and the loss scale are copied
into memory of the graph's own, and so are learning rates, which torch's fused kernels read
from there. If anything else moves or changes (a loaded state, another weight decay), the
step is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UP_STEPS = 3
"""Steps before the capture, in which libraries allocate what they keep (torch's own rule)."""


class CudaGraphStep:
    """A function of a list of inputs, captured when it has run a few times.

    Args:
        run: the step.
        copied: positions of inputs that are other tensors in every step: the batch.
        groups: positions of parameter groups.
    """

    def __init__(
        self, run: Callable[[list[Any]], Any], copied: Sequence[int], groups: Sequence[int]
    ) -> None:
        self._run = run
        self._copied = tuple(copied)
        self._groups = tuple(groups)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._identity: tuple[Any, ...] = ()
        self._inputs: list[Any] = []
        self._outputs: Any = None
        self._warm = 0

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the step, or replay it; what it returns belongs to the caller."""
        identity = self._identity_of(inputs)
        if identity != self._identity:
            self._graph, self._identity, self._warm = None, identity, 0
        if self._graph is None:
            if self._warm < WARM_UP_STEPS:
                self._warm += 1
                return self._on_side_stream(inputs)
            self._capture(inputs)
        assert self._graph is not None
        self._fill(inputs)
        self._graph.replay()
        return tuple(o.clone() if isinstance(o, Tensor) else o for o in self._outputs)

    def _identity_of(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What a captured graph depends on."""
        found: list[Any] = []
        for i, value in enumerate(inputs):
            if i in self._groups:
                found.append(tuple((k, v) for k, v in value.items() if k not in ("params", "lr")))
            elif isinstance(value, Tensor):
                found.append(value.shape if i in self._copied else value.data_ptr())
            else:
                found.append(value)
        return tuple(found)

    def _on_side_stream(self, inputs: list[Any]) -> Any:
        """Run as it will be captured: off the default stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = self._run(list(inputs))
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _capture(self, inputs: Sequence[Any]) -> None:
        self._inputs = list(inputs)
        for i in self._copied:
            self._inputs[i] = inputs[i].clone()
        device = next(v.device for v in inputs if isinstance(v, Tensor))
        for i in self._groups:
            rate = torch.tensor(float(inputs[i]["lr"]), device=device)
            self._inputs[i] = {**inputs[i], "lr": rate}
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._run(list(self._inputs))

    def _fill(self, inputs: Sequence[Any]) -> None:
        """Put this step's batch and learning rates where the graph reads them."""
        for i in self._copied:
            self._inputs[i].copy_(inputs[i], non_blocking=True)
        for i in self._groups:
            self._inputs[i]["lr"].fill_(float(inputs[i]["lr"]))
