"""Every operator that torch tests itself with, on sharded values: torch's number or an error."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map

from fxzero.errors import FxZeroError
from fxzero.sharding.sharded_value import ShardedValue
from tests.parity.harness import Pools

SAMPLES = 1
UNSET = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}
"""Operators whose result is whatever was in memory."""
REFUSED = {"resize_", "resize_as_", "squeeze", "unsqueeze", "transpose", "t", "as_strided"}
"""Whose in-place forms give a tensor another shape."""


@pytest.mark.exhaustive  # half of it is torch's list of them, made by each rank
@pytest.mark.parametrize("world", [3])
def test_every_operator(ranks: Pools, world: int) -> None:
    """Three ranks, so that shards are uneven and some have no rows."""
    for found in ranks(world).run(call_all):
        checked, wrong, failed = found
        assert checked > 900
        assert not wrong
        assert {name for name, _ in failed} <= REFUSED | {"addbmm", "short"}, failed


def call_all() -> tuple[int, list[str], list[tuple[str, str]]]:
    """Job: how many calls were compared, the operators that differ, and those that raise."""
    checked, wrong, failed = 0, [], []
    warnings.simplefilter("ignore")  # of what torch will rename
    for name, call, sample in calls():
        values = (sample.input, sample.args, sample.kwargs)
        seed(1)
        plain = copied(values)
        try:
            expected = call(plain[0], *plain[1], **plain[2])
        except (RuntimeError, TypeError, ValueError):
            continue
        others = any(map(can_be_sharded, tree_leaves(values[1:])))
        for input_alone in (True, False) if others else (True,):
            ours = copied(values)
            given = (sharded(ours[0]), *(ours[1:] if input_alone else sharded(ours[1:])))
            seed(1 + dist.get_rank())
            checked += 1
            try:
                found = call(given[0], *given[1], **given[2])
            except (RuntimeError, FxZeroError) as error:
                failed.append((name, str(error)))
                continue
            if not same(expected, found) or not same(plain[0], given[0]):
                wrong.append(f"{name}, {'its input' if input_alone else 'everything'} sharded")
    return checked, wrong, failed


@pytest.mark.parametrize("world", [3])
def test_dimensions_of_one_row(ranks: Pools, world: int) -> None:
    """Where a rank has one row, it is no dimension of one."""
    assert ranks(world).run(squeezed_otherwise) == [[]] * world


def squeezed_otherwise() -> list[str]:
    """Job: the ways to squeeze that give another value than torch's."""
    plain = torch.arange(20.0).view(5, 1, 4, 1), torch.arange(4.0).view(1, 4)
    ways: list[tuple[Any, ...]] = [(), (0,), (1,), (-1,), ((0, 1),)]
    return [
        f"{tuple(value.shape)}.squeeze{way}"
        for value, way in itertools.product(plain, ways)
        if not same(value.squeeze(*way), sharded(value).squeeze(*way))
    ]


@pytest.mark.parametrize("world", [3])
def test_statistics_of_one_row_a_rank(ranks: Pools, world: int) -> None:
    """They squeeze what they have computed."""
    assert ranks(world).run(correlated_otherwise) == [[]] * world


def correlated_otherwise() -> list[str]:
    """Job: statistics of variables, for several numbers of them, that differ from torch's."""
    found = []
    for function, rows in itertools.product((torch.cov, torch.corrcoef), (1, 2, 3, 5)):
        plain = torch.arange(rows * 4.0, dtype=torch.float64).view(rows, 4).sin()
        if not same(function(plain), function(sharded(plain))):
            found.append(f"{function.__name__} of {rows} rows")
    return found


def seed(number: int) -> None:
    """As `torch.manual_seed`, which without a GPU also formats the stack for one that may come."""
    torch.default_generator.manual_seed(number)


def calls() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Operators with samples of what they take, out of place and in place."""
    # Seconds, for what only ranks need: pytest's own processes import this file too.
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        if operator.name in UNSET or operator.name.startswith("jiterator"):
            continue
        if torch.float64 not in operator.dtypes:
            continue
        seed(0)
        # `sample_inputs` would search the stack for the test of torch's own that asks.
        samples = operator.sample_inputs_func(operator, "cpu", torch.float64, False)
        have_rows = (s for s in samples if any(map(can_be_sharded, tree_leaves(s.input))))
        for sample in list(itertools.islice(have_rows, SAMPLES)):  # before ranks' seeds differ
            for call in (operator.get_op(), operator.get_inplace()):
                if call is not None:
                    yield operator.name, call, sample


def can_be_sharded(value: Any) -> bool:
    """Whether something has rows."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.dim() > 0 and value.numel() > 0


def copied(values: Any) -> Any:
    """The same in memory of its own."""
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, values)


def sharded(values: Any) -> Any:
    """The same with tensors sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(value: Any) -> Any:
        if not can_be_sharded(value):
            return value
        result = distribute_tensor(value.contiguous(), mesh, [Shard(0)], src_data_rank=None)
        result.__class__ = ShardedValue
        return result

    return tree_map(shard, values)


def same(expected: Any, found: Any) -> bool:
    """Whether results are equal, up to the order of sums."""
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    return len(ours) == len(theirs) and all(map(same_leaf, theirs, ours))


def same_leaf(expected: Any, found: Any) -> bool:
    """Whether two tensors or numbers are equal."""
    if isinstance(found, DTensor):
        found = found.full_tensor()
    if not isinstance(expected, Tensor):
        return bool(expected == found) or expected != expected
    if expected.layout is not torch.strided:
        return True  # what DTensor makes of it has no such layout
    return expected.shape == found.shape and torch.allclose(
        expected.to(torch.complex128), found.to(torch.complex128), 1e-9, 1e-10, equal_nan=True
    )
