"""Regions: compiled once per distinct structure, called from many places.

Two regions have one structure when they apply the same operators with the same
constants to inputs of the same shapes, strides, dtypes and devices. A hundred equal
layers therefore cost one compilation, in one graph and across graphs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxzero._compat import fresh_tracing_context, inductor_compile, is_fake
from fxzero.graph.aliases import view_base
from fxzero.graph.operators import tensor_bytes
from fxzero.graph.structure import StructureKey

log = logging.getLogger("fxzero")


@dataclass
class Structure:
    """One compiled structure.

    Callers rely on the graph's aliasing: they free memory by it. A compiler may place
    one output inside of another (a concatenation's parts, say); the first call compares
    real storages with `roots`, and outputs that share memory unexpectedly are copied
    from then on.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    roots: tuple[int, ...]
    """Per output, who owns its memory: an input ``-1 - i``, or a number of its own."""
    values: tuple[Any, ...] = ()
    """Fake outputs, for a call on fake tensors."""
    root_bytes: tuple[int, ...] = ()
    """Per output, what its owner takes: more than the output, if that is a view of a part."""
    keep: Any = None
    """What the key's identities belong to, so that they stay unique."""
    copied: frozenset[int] | None = None
    """Outputs to copy; None before the first call."""
    measured_bytes: int | None = None
    """The most that it holds while it runs, its inputs aside; None if nobody has measured it."""

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self.copied is None:
            return self._first_call(inputs)
        outputs = self.run(inputs)
        if self.copied:
            outputs = [o.clone() if i in self.copied else o for i, o in enumerate(outputs)]
        return outputs

    def _first_call(self, inputs: list[Any]) -> Sequence[Any]:
        if (fake := next(filter(is_fake, inputs), None)) is not None:
            with fake.fake_mode:
                return [_empty_like(value) for value in self.values]
        owners = {_address(value): -1 - i for i, value in enumerate(inputs) if _has_memory(value)}
        outputs = self.run(inputs)
        copied = set()
        for i, value in enumerate(outputs):
            if _has_memory(value):
                root = self.roots[i]
                owner = owners.setdefault(_address(value), root)
                # Inputs may alias each other: any input is as good as the expected one.
                if owner != root and not (owner < 0 and root < 0):
                    copied.add(i)
        self.copied = frozenset(copied)
        return [o.clone() if i in copied else o for i, o in enumerate(outputs)]


def _empty_like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() > 0


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


class Region:
    """One place in a graph from which a structure is called."""

    __module__ = "fxzero.regions.region"

    def __init__(self, name: str, structure: Structure, key: StructureKey) -> None:
        self.__name__ = self.__qualname__ = name
        self.structure = structure
        self.key = key

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.structure(list(inputs))

    def __repr__(self) -> str:
        return f"Region({self.__name__})"


@dataclass
class RegionCache:
    """Structures by key, for the life of the process."""

    structures: dict[object, Structure] = field(default_factory=dict)
    compilations: int = 0
    compiles: bool = True
    """Whether regions are for running. Otherwise they return fake tensors."""

    def get(
        self, key: StructureKey, module: Callable[[], fx.GraphModule], fake_mode: Any
    ) -> Structure:
        """The compiled structure of a region.

        Args:
            key: what `fxzero.graph.structure.structure_key` says of it.
            module: makes the region a module of its own, to compile it if it is new.
        """
        found = self.structures.get(key)
        if found is None:
            found = _structure(module(), key, fake_mode, self.compiles)
            self.structures[key] = found
            self.compilations += 1
        return found

    def fill(
        self, wanted: Mapping[StructureKey, Callable[[], fx.GraphModule]], fake_mode: Any
    ) -> None:
        """Compile what is new of some regions, and say so: it is where a first step's time goes."""
        new = [key for key in wanted if key not in self.structures]
        if not new or not self.compiles:
            return
        log.info("compiling %d regions", len(new))
        start = said = time.perf_counter()
        for number, key in enumerate(new, start=1):
            self.get(key, wanted[key], fake_mode)
            now = time.perf_counter()
            if now - said > SECONDS_BETWEEN_WORDS or number == len(new):
                log.info("compiled %d of %d regions in %.1f s", number, len(new), now - start)
                said = now


def take_casts_apart(graph: fx.Graph) -> None:
    """Write casts as Inductor has them once it has taken a graph apart.

    Passes emit torch's own operator, which fuses with nothing and which Inductor, beside a
    decomposition of it, refuses to call.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if node.kwargs.keys() == {"dtype"}:
            node.target = torch.ops.prims.convert_element_type.default
            node.args, node.kwargs = (node.args[0], node.kwargs["dtype"]), {}


def ready_to_lower(module: fx.GraphModule) -> list[Any]:
    """Write a region as Inductor takes it; the fake values of its inputs."""
    take_casts_apart(module.graph)
    module.recompile()
    return [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]


def _structure(
    module: fx.GraphModule, key: StructureKey, fake_mode: Any, compiles: bool
) -> Structure:
    roots, root_bytes = output_roots(module.graph)
    values = tuple(n.meta["val"] for n in next(iter(reversed(module.graph.nodes))).args[0])
    keep = None if key.environment is None else fake_mode.shape_env
    if not compiles:
        return Structure(
            lambda _: [_empty_like(v) for v in values], roots, values, root_bytes, keep
        )
    inputs = ready_to_lower(module)
    with fresh_tracing_context(fake_mode):
        return Structure(inductor_compile(module, inputs), roots, values, root_bytes, keep)


SECONDS_BETWEEN_WORDS = 5.0

CACHE = RegionCache()


@contextlib.contextmanager
def regions_to_look_at() -> Iterator[None]:
    """Form regions inside and compile none; forget them afterwards, and what was there before."""
    before = CACHE.structures, CACHE.compiles
    CACHE.structures, CACHE.compiles = {}, False
    try:
        yield
    finally:
        CACHE.structures, CACHE.compiles = before


def output_roots(graph: fx.Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per output, the owner of its memory, and what that takes: see `Structure`."""
    roots: dict[fx.Node, int] = {}
    num_bytes: dict[int, int] = {}
    num_inputs = 0
    for position, node in enumerate(graph.nodes):
        base = view_base(node)
        if node.op == "placeholder":
            roots[node] = -1 - num_inputs
            num_inputs += 1
        elif base is not None:
            roots[node] = roots[base]
        else:
            roots[node] = position
            num_bytes[position] = tensor_bytes(node.meta.get("val"))
    outputs = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(outputs, (list, tuple))
    nodes = [n for n in outputs if isinstance(n, fx.Node)]
    return (
        tuple(roots[n] for n in nodes),
        tuple(max(tensor_bytes(n.meta["val"]), num_bytes.get(roots[n], 0)) for n in nodes),
    )
