"""Analyses and pages for the tests of `fxzero report`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxzero.inspect import Analysis, capture
from fxzero.inspect.detail import GraphDetail, Measured, NodeRow, PassText, SpanRow
from tests.tracing import BY_LAYER

Open = Callable[..., Any]
"""Opens a page of an analysis; see `tests.inspect.conftest.opened`."""

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Hostile(nn.Module):
    """A model whose parameter's name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(HOSTILE, nn.Parameter(torch.empty(16, 16)))
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 16) to a loss."""
        return self.layer(x @ getattr(self, HOSTILE)).sum()


class Block(nn.Module):
    """Two matrices around a nonlinearity, beside the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to the same."""
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """Equal layers between two others."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to a loss."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


@functools.cache
def small(zero: int = 3) -> Analysis:
    """Three layers, a bucket each."""
    return of_model(lambda: (Blocks(), (torch.ones(4, 32),)), zero=zero)


@functools.cache
def small_step(micro_batches: int = 7) -> Analysis:
    """A whole step, of whose micro-batches one stands for others."""
    return of_model(
        lambda: (Blocks(), (torch.ones(4 * micro_batches, 32),)),
        step=True,
        micro_batches=micro_batches,
    )


@functools.cache
def hostile() -> Analysis:
    """Of `Hostile`."""
    return of_model(lambda: (Hostile(), (torch.ones(4, 16),)))


def of_model(build: Any, zero: int = 3, **settings: Any) -> Analysis:
    """Captured with all details."""
    options = {**BY_LAYER, "keep_text": True}
    captured = capture(build, zero=zero, world_size=8, options=options, **settings)
    return Analysis.of(captured, memory=True, detail=True)


def with_detail(analysis: Analysis, **changes: Any) -> Analysis:
    """The same with another detail of its one graph."""
    (detail,) = analysis.details
    return replace(analysis, details=(replace(detail, **changes),))


def measured(analysis: Analysis) -> Analysis:
    """As if it had run, half as fast as predicted."""
    (detail,) = analysis.details
    spans = tuple(replace(s, start_us=2 * s.start_us, us=2 * s.us) for s in detail.spans)
    took = 2 * analysis.schedules[0].makespan_us
    run = Measured("step", (took, took * 1.1, took * 0.9), spans, 12 << 20, "cpu")
    return with_detail(analysis, measured=(run,))


def deep(analysis: Analysis, num_layers: int) -> Analysis:
    """As if the model had so many layers: rows of its last one again and again, longer texts."""
    (detail,) = analysis.details
    nodes, spans = list(detail.nodes), list(detail.spans)
    for layer in range(3, num_layers):
        nodes += [_moved(row, layer) for row in detail.nodes if row.layer == "blocks.2"]
        spans += [_later(span, layer) for span in detail.spans if span.layer == "blocks.2"]
    texts = tuple(_longer(text, num_layers // 3) for text in detail.texts)
    held = detail.held * (num_layers // 3)
    found: GraphDetail = replace(
        detail, nodes=tuple(nodes), spans=tuple(spans), texts=texts, held=held
    )
    return replace(analysis, details=(found,))


def _moved(row: NodeRow, layer: int) -> NodeRow:
    def named(text: str) -> str:
        return text.replace("blocks_2", f"blocks_{layer}").replace("blocks.2", f"blocks.{layer}")

    return replace(
        row,
        name=f"{named(row.name)}_{layer}",
        text=named(row.text),
        layer=named(row.layer),
        module=named(row.module),
        params=tuple(map(named, row.params)),
        inputs=tuple(f"{named(name)}_{layer}" for name in row.inputs),
    )


def _later(span: SpanRow, layer: int) -> SpanRow:
    return replace(
        span, node=f"{span.node}_{layer}", layer=f"blocks.{layer}", start_us=span.start_us * layer
    )


def _longer(text: PassText, times: int) -> PassText:
    lines = text.text.splitlines()
    return replace(text, text="\n".join(f"{line} {i}" for i in range(times) for line in lines))


def drawn(shown: Any, tab: str) -> str:
    """What its first canvas shows."""
    shown.wait_for_timeout(80)  # drawn in the next frame
    return str(
        shown.eval_on_selector(f"#panel-{tab} canvas", "canvas => canvas.toDataURL().slice()")
    )
