"""What fxzero knows about one parameter, and where it finds it again.

`ParamSpec` is the whole truth about how a parameter is laid out: its full shape,
its shard on this rank, the dtypes on its way, the groups it travels in. Operators
carry only a key (``"0/h.0.attn.weight"``: the model's number, then the parameter's
fully qualified name), so that a printed graph stays readable.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxzero.errors import CaptureError
from fxzero.ranks.groups import Group
from fxzero.sharding.layout import WHOLE, AxisRole, Layout
from fxzero.sharding.pipeline import Pipeline

KEY = "_fxzero_key"
"""Attribute of a parameter that `shard` has laid out: its key. What comes of one has none."""


class GradSync(StrEnum):
    """What `reshard_grad` does with a full gradient."""

    REDUCE = "reduce"
    """Average it over the ranks, keep this rank's shard."""
    ACCUMULATE = "accumulate"
    """Keep it whole on this rank (inside `fxzero.no_sync`, stages 0 and 1)."""
    REDUCE_ACCUMULATED = "reduce_accumulated"
    """Add what was kept before, then reduce."""


@dataclass
class KeptGradient:
    """A full gradient that `no_sync` keeps on this rank."""

    grad: torch.Tensor
    backward: int
    """The backward that added to it last: see `fxzero._compat.backward_number`."""
    version: int | None = None
    """The version of the parameter's ``.grad`` after that backward; None while it runs."""


@dataclass
class Traffic:
    """Collectives that ran, with bytes of the full tensors that they moved, and copies between the
    device and the host's memory, with bytes of this rank's parts."""

    num_gathers: int = 0
    gathered_bytes: int = 0
    num_reduces: int = 0
    reduced_bytes: int = 0
    num_uploads: int = 0
    """Copies of parameters from the host's memory to the device, and what this rank moved so."""
    uploaded_bytes: int = 0
    num_downloads: int = 0
    """Copies of gradients to the host's memory."""
    downloaded_bytes: int = 0

    def add(self, other: Traffic) -> None:
        """Count another run in."""
        self.num_gathers += other.num_gathers
        self.gathered_bytes += other.gathered_bytes
        self.num_reduces += other.num_reduces
        self.reduced_bytes += other.reduced_bytes
        self.num_uploads += other.num_uploads
        self.uploaded_bytes += other.uploaded_bytes
        self.num_downloads += other.num_downloads
        self.downloaded_bytes += other.downloaded_bytes


class Modes:
    """By model, the `GradSync` value that holds now, as an attribute.

    Compiled forwards come here for each parameter. To an object that all modules held they would
    come by as many ways, and Dynamo would see in every call that all of them lead to the same one.
    """


MODES = Modes()
_modes = itertools.count()


@dataclass(eq=False)
class ModelState:
    """What all parameters of one sharded model share."""

    zero: int
    number: int
    mode: str = field(default_factory=lambda: f"model_{next(_modes)}")
    """The attribute of `MODES` that says what happens to its gradients."""
    kept: dict[str, KeptGradient] = field(default_factory=dict)
    """Full gradients kept back by `no_sync`, by parameter key."""
    synchronised: bool = False
    """Whether a backward has reduced gradients since the last one that kept some."""
    traffic: Traffic = field(default_factory=Traffic)
    """What compiled graphs of this model have communicated so far."""
    pipeline: Pipeline | None = None
    """The pipeline whose stages hold its parameters, if it has one."""
    buffers: Callable[[], None] | None = None
    """Broadcasts the buffers that a forward has changed; None if every rank keeps its own."""

    def __post_init__(self) -> None:
        self.sync = GradSync.REDUCE.value
        weakref.finalize(self, vars(MODES).pop, self.mode, None)

    @property
    def sync(self) -> str:
        """A `GradSync` value. A plain string, so that Dynamo guards on it."""
        return str(getattr(MODES, self.mode))

    @sync.setter
    def sync(self, value: str) -> None:
        setattr(MODES, self.mode, value)


@dataclass(frozen=True)
class Block:
    """Which columns of a matrix travel for themselves: see `fxzero.passes.tile_linear`."""

    owner: str
    """The key of the parameter that they are of."""
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """How one parameter lives: shapes in elements, dtypes, groups."""

    name: str
    """Fully qualified name; for tied parameters the first one."""
    key: str
    """``"<model number>/<name>"``, unique in the process."""
    state: ModelState
    shape: tuple[int, ...]
    """Full shape."""
    dtype: torch.dtype
    """Dtype of the master shard and of its gradient."""
    compute_dtype: torch.dtype
    """Dtype that the model computes in; the cast happens before the gather."""
    reduce_dtype: torch.dtype
    """Dtype in which gradients travel."""
    layout: Layout = WHOLE
    """Where its parts are, and what travels for it."""
    parameter: weakref.ref[torch.nn.Parameter] | None = None
    """The parameter itself, to see whether its gradient was set to None."""
    block: Block | None = None
    """Of some columns of a parameter: which. All rows of them are there, on each rank its own."""
    stages: tuple[int, ...] = ()
    """Of a pipeline, the stages that hold it, first one first."""
    device: torch.device | None = None
    """Where it is computed with, if its shard and its gradient are in the host's memory; None if
    they are on that device, too."""

    @classmethod
    def whole(
        cls,
        parameter: torch.nn.Parameter,
        name: str,
        key: str,
        state: ModelState,
        layout: Layout = WHOLE,
    ) -> ParamSpec:
        """A parameter that every rank holds, computes with and reduces as it is."""
        return cls(
            name=name,
            key=key,
            state=state,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            compute_dtype=parameter.dtype,
            reduce_dtype=parameter.dtype,
            layout=layout,
        )

    def columns(self, start: int, stop: int, word: str) -> ParamSpec:
        """Some columns of a matrix, laid out as all of it is.

        Args:
            word: what its name ends with.
        """
        return replace(
            self,
            name=f"{self.name}.{word}",
            key=f"{self.key}.{word}",
            shape=(self.shape[0], stop - start),
            block=Block(self.key, start, stop),
        )

    @cached_property
    def shard_group(self) -> Group | None:
        """Ranks that hold the parts of dim 0; None when every rank holds all of it."""
        groups = self.layout.groups_of(AxisRole.SHARD)
        assert len(groups) < 2, "dim 0 is cut once"
        return groups[0] if groups else None

    @cached_property
    def replica_groups(self) -> tuple[Group, ...]:
        """Groups over which this rank's part is repeated: gradients are all-reduced there."""
        return self.layout.groups_of(AxisRole.REPLICATE)

    @cached_property
    def reduced_over(self) -> tuple[Group, ...]:
        """All groups over which its gradient is reduced, innermost first."""
        return tuple(axis.group for _, axis in self.layout.reductions)

    @property
    def is_here(self) -> bool:
        """Whether this rank holds it, or a part of it: not if it is of other stages."""
        return not self.layout.absent

    def refuse_outside_of_a_step(self) -> None:
        """Stages of a pipeline run by one compiled step, in the order of their schedule.

        Raises:
            CaptureError: it is of a stage.
        """
        if self.stages:
            raise CaptureError(
                f"{self.name} is of stage {' and '.join(map(str, self.stages))} of a pipeline, and "
                "a forward outside of fxzero.compile_step reads it. The ordinary loop cannot run "
                "stages, each of which has to wait for another: call fxzero.compile_step(model, "
                "optimizer, loss_fn, micro_batches=…)."
            )

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for parameters that are laid out and travel alike."""
        dtypes = (self.dtype, self.compute_dtype, self.reduce_dtype)
        layout = (self.layout.axes, self.layout.placements, self.stages, self.device)
        return (id(self.state), self.shape, *dtypes, *layout)

    @property
    def zero(self) -> int:
        """The ZeRO stage."""
        return self.state.zero

    @property
    def num_elements(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest shard: what each rank contributes to a gather, padded."""
        if self.shard_group is None:
            return self.shape[0] if self.shape else 1
        return -(-self.shape[0] // self.shard_group.size)

    @property
    def local_rows(self) -> slice:
        """The rows that this rank holds, by the rule of `torch.chunk`."""
        assert self.shard_group is not None
        start = min(self.shard_group.rank * self.chunk_rows, self.shape[0])
        return slice(start, min(start + self.chunk_rows, self.shape[0]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        if self.layout.absent:
            return (0,)  # as torch has it of DTensors on meshes that a rank is not in
        if self.shard_group is None:
            return self.shape
        rows = self.local_rows
        return (rows.stop - rows.start, *self.shape[1:])

    @property
    def padded_rows(self) -> int:
        """Rows of the gathered buffer; more than `shape[0]` when the split is uneven."""
        assert self.shard_group is not None
        return self.chunk_rows * self.shard_group.size

    @property
    def is_padded(self) -> bool:
        """Whether the shards have unequal rows, so that gathers carry padding."""
        return self.shard_group is not None and self.padded_rows != self.shape[0]

    @property
    def layer(self) -> str:
        """The layer that owns it: see `layer_of`. A block of columns is one of its own, so that it
        travels and is computed with alone."""
        return self.name if self.block is not None else layer_of(self.name.rpartition(".")[0])


def layer_of(module_path: str) -> str:
    """The repeated block that a module belongs to.

    The path up to and including its first index: ``"model.layers.3.mlp.up"`` is in
    ``"model.layers.3"``. A path without an index is its first component: ``"head"``.
    """
    parts = module_path.split(".") if module_path else []
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0] if parts else ""


_known = WeakIdKeyDictionary()
_plain = WeakIdKeyDictionary()


def remember(parameter: torch.nn.Parameter, spec: ParamSpec | None = None) -> None:
    """Note that `shard` has seen a parameter, be it to shard it or to ignore it (no spec)."""
    _known[parameter] = spec


def remember_plain(parameter: torch.nn.Parameter, spec: ParamSpec) -> None:
    """Note a parameter of a model that nobody sharded: stage 0."""
    _plain[parameter] = spec


def is_known(parameter: torch.Tensor) -> bool:
    """Whether `shard` has seen a parameter. One that it has not is stage 0."""
    return parameter in _known


def spec_of_parameter(parameter: torch.Tensor) -> ParamSpec | None:
    """How a parameter is laid out; None of one that nobody has seen, or that is ignored."""
    found: ParamSpec | None = _known.get(parameter) or _plain.get(parameter)
    return found


def plain_spec_of(parameter: torch.Tensor) -> ParamSpec | None:
    """The spec of a parameter of a model that nobody sharded, once a graph has met it."""
    found: ParamSpec | None = _plain.get(parameter)
    return found


_specs: weakref.WeakValueDictionary[str, ParamSpec] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def next_model_number() -> int:
    """A number for a model that is about to be sharded."""
    return next(_numbers)


def register(spec: ParamSpec) -> ParamSpec:
    """Make a spec findable by its key for as long as something holds it."""
    _specs[spec.key] = spec
    return spec


def unread_beside(specs: Mapping[str, ParamSpec]) -> tuple[ParamSpec, ...]:
    """The other parameters of the models that some parameters are of.

    Args:
        specs: by key; blocks of a parameter stand for all of it.
    """
    models = {id(spec.state) for spec in specs.values()}
    read = set(specs) | {spec.block.owner for spec in specs.values() if spec.block is not None}
    return tuple(
        spec
        for key, spec in list(_specs.items())
        if id(spec.state) in models and key not in read and spec.block is None
    )


def is_key(text: str) -> bool:
    """Whether a string is the key of a living parameter."""
    return text in _specs


def spec_of(key: str) -> ParamSpec:
    """Find a spec by its key.

    Raises:
        CaptureError: the model it belonged to is gone.
    """
    spec = _specs.get(key)
    if spec is None:
        raise CaptureError(
            f"no sharded parameter has the key {key!r}: its model was deleted while a graph "
            "that reads it is still in use. Keep the model alive as long as its graphs."
        )
    return spec


@contextmanager
def grad_sync(state: ModelState, mode: GradSync) -> Iterator[None]:
    """Let graphs traced inside use another `GradSync`; afterwards what is kept is reduced."""
    before = state.sync
    state.sync = mode.value
    try:
        yield
    finally:
        if before == GradSync.REDUCE.value and mode is GradSync.ACCUMULATE:
            # Backwards of what ran inside may still come, and keep something.
            before = GradSync.REDUCE_ACCUMULATED.value
        state.sync = before
