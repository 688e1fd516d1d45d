"""Equal layers that a graph does without for a while: the one before them stands for them.

    h.0  h.1  h.2  ·················  h.94  h.95        the graph, and what the cut-out layers own
                   h.3, h.4, … h.93

What passes do to the layers of a chain before transfers are placed, they do to its neighbours
alike. So they are shown five layers of it, and `fxzero.passes.expand_layers` makes the others by
the third. Until then the inputs of the others are there, nobody reads them, and the graph returns
nothing in the place of their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx


@dataclass(frozen=True)
class LayerPlace:
    """What one of equal layers has for itself in a graph."""

    name: str
    """The layer, as stamps name it."""
    inputs: tuple[fx.Node, ...]
    """The graph's inputs that it alone reads."""
    gradients: tuple[int | None, ...]
    """By input, which output of the graph its gradient is; None if it has none."""
    keys: tuple[str, ...]
    """By input, the parameter that it is; empty if it is none."""
    modules: tuple[Any, ...]
    """The module stacks of what it calls."""

    def moved(self, copies: Mapping[fx.Node, fx.Node]) -> LayerPlace:
        """The same in a copy of the graph."""
        return replace(self, inputs=tuple(copies[node] for node in self.inputs))


@dataclass(frozen=True)
class LeftOut:
    """The middle of a chain of layers."""

    kept: tuple[LayerPlace, LayerPlace, LayerPlace, LayerPlace, LayerPlace]
    """Layers that the graph holds: three before the others, two behind them."""
    layers: tuple[LayerPlace, ...]
    """Those that it does not hold, in order."""
    parameters: dict[int, str]
    """By output, the parameter whose gradient is missing there."""

    def moved(self, copies: Mapping[fx.Node, fx.Node]) -> LeftOut:
        """The same in a copy of the graph."""
        a, b, c, d, e = (place.moved(copies) for place in self.kept)
        layers = tuple(place.moved(copies) for place in self.layers)
        return LeftOut((a, b, c, d, e), layers, self.parameters)

    @property
    def example(self) -> LayerPlace:
        """The layer that the others are made by."""
        return self.kept[2]
