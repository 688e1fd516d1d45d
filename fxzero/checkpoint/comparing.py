"""Two checkpoints side by side, by names: which tensors and values differ, and by how much.

    model.h.0.attn.weight    3.1e-05, 1.3e-05 of its largest    8,192 of 65,536 elements differ
    scheduler.last_epoch     100 → 120

World size, ZeRO stage and mesh are no difference: tensors are compared whole, a few at a time, so
that neither checkpoint is ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxzero.checkpoint.opened import Opened
from fxzero.checkpoint.values import decode

_SLICE_ELEMENTS = 1 << 20
"""Compared at once, in double precision."""
_MISSING = "—"


@dataclass(frozen=True)
class FormDifference:
    """A tensor of another shape or dtype."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class TensorDifference:
    """A tensor with other values."""

    name: str
    largest: float
    """Absolute difference of two elements that are both finite."""
    relative: float
    """The same, in parts of the largest element of either tensor."""
    num_different: int
    """Elements."""
    num_elements: int
    num_non_finite: int
    """Elements that are infinite or no number, and something else on the other side."""


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs, or is on one side alone."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Compared:
    """All differences."""

    before: Path
    after: Path
    only_before: tuple[str, ...]
    """Tensors."""
    only_after: tuple[str, ...]
    forms: tuple[FormDifference, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    num_equal: int
    """Tensors that are equal to the bit, or to the sign of zeros."""
    skipped: tuple[str, ...]
    """What could not be compared, and why."""

    @property
    def is_equal(self) -> bool:
        """Nothing differs."""
        return not (
            self.only_before or self.only_after or self.forms or self.tensors or self.values
        )

    def to_json(self) -> dict[str, Any]:
        """As docs/checkpoint.md says."""
        return {
            "before": str(self.before),
            "after": str(self.after),
            "is_equal": self.is_equal,
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
            "forms": [asdict(row) for row in self.forms],
            "tensors": [asdict(row) for row in self.tensors],
            "values": [asdict(row) for row in self.values],
            "num_equal": self.num_equal,
            "skipped": list(self.skipped),
        }


def compare(before: Opened, after: Opened) -> Compared:
    """Compare all that two checkpoints have.

    Raises:
        CheckpointError: one of them is not whole.
    """
    one, other = before.tensors, after.tensors
    both = [name for name in one if name in other]
    forms = []
    comparable = []
    for name in both:
        forms_of = [_form(t[name].size, t[name].properties.dtype) for t in (one, other)]
        if forms_of[0] != forms_of[1]:
            forms.append(FormDifference(name, *forms_of))
        if one[name].size == other[name].size:
            comparable.append(name)
    tensors = []
    for batch in before.batches(comparable):
        mine, theirs = before.read(batch), after.read(batch)
        for name in batch:
            found = difference(name, mine.pop(name), theirs.pop(name))
            if found is not None:
                tensors.append(found)
    values, skipped = _compare_values(before, after)
    return Compared(
        before=before.path,
        after=after.path,
        only_before=tuple(name for name in one if name not in other),
        only_after=tuple(name for name in other if name not in one),
        forms=tuple(forms),
        tensors=tuple(tensors),
        values=tuple(values),
        num_equal=len({*comparable} - {r.name for r in tensors} - {r.name for r in forms}),
        skipped=tuple(skipped),
    )


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def difference(name: str, before: Tensor, after: Tensor) -> TensorDifference | None:
    """By how much two tensors of a shape differ; None if their values are equal. What is no number
    on both sides is equal."""
    if before.dtype == after.dtype and _same_bytes(before, after):
        return None
    largest = scale = 0.0
    num_different = num_non_finite = 0
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    slices = [t.reshape(-1).split(_SLICE_ELEMENTS) for t in (before, after)]
    for mine, theirs in zip(*slices, strict=True):
        is_exact = mine.dtype == theirs.dtype and not mine.is_floating_point()
        a, b = mine.to(wide), theirs.to(wide)
        finite = a.isfinite() & b.isfinite()
        # Integers beyond 2 ** 53 are rounded in `a` and `b`, and are compared as they are.
        differ = mine != theirs if is_exact else (a != b) & ~(a.isnan() & b.isnan())
        num_different += int(differ.sum())
        num_non_finite += int((differ & ~finite).sum())
        if finite.any():
            largest = max(largest, float((a - b).abs()[finite].max()))
            scale = max(scale, float(a[finite].abs().max()), float(b[finite].abs().max()))
    if not num_different:
        return None
    return TensorDifference(
        name=name,
        largest=largest,
        relative=largest / scale if scale else 0.0,
        num_different=num_different,
        num_elements=before.numel(),
        num_non_finite=num_non_finite,
    )


def _same_bytes(before: Tensor, after: Tensor) -> bool:
    """So are most tensors of checkpoints that should be equal; figures take ten times as long."""
    flat = [t.detach().reshape(-1) for t in (before, after)]
    return not before.numel() or torch.equal(*(t.view(torch.uint8) for t in flat))


# -- values


def _compare_values(before: Opened, after: Opened) -> tuple[list[ValueDifference], list[str]]:
    """What differs of schedules, generators, groups; and what could not be compared."""
    one, other = before.values(), after.values()
    if one is None or other is None:
        lacking = [str(o.path) for o, v in ((before, one), (after, other)) if v is None]
        return [], [f"values: {' and '.join(lacking)} has them as a pickle, which is not read"]
    found: list[ValueDifference] = []
    for part in dict.fromkeys([*one, *other]):
        if part not in one or part not in other:
            found += _walk(part, _decoded(one.get(part)), _decoded(other.get(part)))
        elif "all" in one[part] and "all" in other[part]:
            found += _walk(part, decode(one[part]["all"]), decode(other[part]["all"]))
        else:
            mine, theirs = _of_ranks(one[part]), _of_ranks(other[part])
            count = max(len(mine), len(theirs))
            if len(mine) == 1 or len(theirs) == 1:  # equal on all ranks of one side
                mine, theirs = mine * (count // len(mine)), theirs * (count // len(theirs))
            for rank in range(count):
                a = mine[rank] if rank < len(mine) else _Missing
                b = theirs[rank] if rank < len(theirs) else _Missing
                found += _walk(f"{part} of rank {rank}" if count > 1 else part, a, b)
    return found, []


class _Missing:
    """What one side does not have."""


def _of_ranks(value: Mapping[str, Any]) -> list[Any]:
    return [decode(each) for each in value["ranks"]] if "ranks" in value else [decode(value["all"])]


def _decoded(value: Mapping[str, Any] | None) -> Any:
    return _Missing if value is None else _of_ranks(value)[0]


def _walk(path: str, before: Any, after: Any) -> Iterator[ValueDifference]:
    """Where two values differ, as deep as they are alike."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            inner = f"{path}.{key}"
            yield from _walk(inner, before.get(key, _Missing), after.get(key, _Missing))
    elif _is_list(before) and _is_list(after) and len(before) == len(after):
        if len(before) > _MOST_LISTED and _is_flat(before) and _is_flat(after):
            num = sum(not _equal(a, b) for a, b in zip(before, after, strict=True))
            if num:
                of = f"{len(before)} values"
                yield ValueDifference(path, of, f"{of}, {num} others")
            return
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from _walk(f"{path}[{i}]", a, b)
    elif not _equal(before, after):
        mine, theirs = _text(before), _text(after)
        yield ValueDifference(path, mine, f"{theirs}, others" if mine == theirs else theirs)


_MOST_LISTED = 32
"""Elements of a list of numbers that are named one by one: states of generators are longer."""


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_flat(values: Sequence[Any]) -> bool:
    return all(not isinstance(value, (Mapping, list, tuple)) for value in values)


def _equal(before: Any, after: Any) -> bool:
    """Of one type and value, to the bit; what is no number is equal to itself."""
    if type(before) is not type(after):
        return False
    if isinstance(before, Tensor):
        return (before.dtype, before.shape) == (after.dtype, after.shape) and (
            difference("", before, after) is None
        )
    if isinstance(before, (np.ndarray, np.generic)):
        return before.dtype == after.dtype and (
            np.asarray(before).tobytes() == np.asarray(after).tobytes()
        )
    if isinstance(before, float) and math.isnan(before):
        return math.isnan(after)
    return bool(before == after)


def _text(value: Any) -> str:
    """A value on one line."""
    if value is _Missing:
        return _MISSING
    if isinstance(value, Tensor):
        return (
            f"tensor {_form(value.shape, value.dtype)}" if value.numel() > 1 else str(value.item())
        )
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
