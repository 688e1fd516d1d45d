"""More than one forward or backward to an optimizer step, with and without `no_sync`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxzero
from fxzero.sharding.leftovers import reduce_leftovers
from fxzero.sharding.shard import model_state
from tests.parity.harness import Pools
from tests.parity.models import Example
from tests.parity.sharded import (
    FLOAT64,
    TIGHT,
    batches_of,
    ends_in_every_run,
    inner,
    on_two_ranks,
    take_step,
    with_reference,
)
from tests.parity.training import (
    adamw,
    assert_same,
    full_gradients,
    make_batch,
    rows_of_rank,
)
from tests.tiers import exhaustive

# -- more than one forward or backward to a step


@on_two_ranks
@ends_in_every_run
def test_gradient_accumulation(ranks: Pools, world: int, zero: int) -> None:
    """Three micro-batches add up in ``.grad``, twice, with a step and `zero_grad` between."""
    ranks(world).run(accumulate, zero)


def accumulate(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("gpt", zero)
    contexts = [nullcontext] * 3
    for step in range(2):
        compare_accumulation(example, model, reference, contexts, first_seed=3 * step)
        for each in (model, reference):
            take_step(each)


def compare_accumulation(
    example: Example,
    model: nn.Module,
    reference: nn.Module,
    contexts: list[Callable[[], AbstractContextManager[None]]],
    first_seed: int,
) -> None:
    """Run one micro-batch in each context, and compare the sums of gradients after the last."""
    for seed, context in enumerate(contexts, start=first_seed):
        batch = make_batch(example, FLOAT64, seed)
        example.loss(reference, batch).backward()
        with context():
            example.loss(model, rows_of_rank(batch)).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@ends_in_every_run
def test_forwards_before_a_backward(ranks: Pools, world: int, zero: int) -> None:
    """Two forwards alive at once, joined in one loss."""
    ranks(world).run(join_two_forwards, zero)


def join_two_forwards(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("odd_shapes", zero)
    first, second = batches_of(example, 2)
    joined = [example.loss(model, rows_of_rank(batch)) for batch in (first, second)]
    (joined[0] * 3 + joined[1]).backward()
    (example.loss(reference, first) * 3 + example.loss(reference, second)).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@ends_in_every_run
def test_backward_twice(ranks: Pools, world: int, zero: int) -> None:
    """With ``retain_graph=True`` nothing that the second backward needs may be gone."""
    ranks(world).run(go_back_twice, zero)


def go_back_twice(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("mlp", zero)
    batch = make_batch(example, FLOAT64, seed=0)
    for each, part in ((model, rows_of_rank(batch)), (reference, batch)):
        loss = example.loss(each, part)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


# -- no_sync


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("compile_it", [True, False], ids=["compiled", "uncompiled"])
def test_no_sync(ranks: Pools, world: int, zero: int, compile_it: bool) -> None:
    """Two micro-batches without a reduction, one with it, twice."""
    ranks(world).run(accumulate_without_sync, zero, compile_it)


def accumulate_without_sync(zero: int, compile_it: bool) -> None:
    """Job."""
    example, model, reference = with_reference("odd_shapes", zero)
    if not compile_it:
        model = inner(model)
    contexts = [lambda: fxzero.no_sync(model)] * 2 + [nullcontext]
    for step in range(2):
        compare_accumulation(example, model, reference, contexts, first_seed=3 * step)
        for each in (model, reference):
            take_step(each)


@on_two_ranks
@pytest.mark.parametrize(("kept_after", "zero"), [(0, 1), (1, 0), *exhaustive((0, 0), (1, 1))])
def test_zero_grad_forgets_what_no_sync_kept(
    ranks: Pools, world: int, kept_after: int, zero: int
) -> None:
    """A micro-batch that is dropped before its reduction leaves nothing behind."""
    ranks(world).run(drop_a_micro_batch, kept_after, zero)


def drop_a_micro_batch(kept_after: int, zero: int) -> None:
    """Job: after the dropped one, `kept_after` micro-batches without a reduction and one with."""
    example, model, reference = with_reference("odd_shapes", zero)
    dropped = rows_of_rank(make_batch(example, FLOAT64, seed=9))
    with fxzero.no_sync(model):
        example.loss(model, dropped).backward()
    adamw(model.parameters()).zero_grad()
    contexts = [lambda: fxzero.no_sync(model)] * kept_after + [nullcontext]
    compare_accumulation(example, model, reference, contexts, first_seed=0)


@on_two_ranks
@pytest.mark.parametrize("zero", [1, *exhaustive(0)])
def test_no_sync_follows_the_forward(ranks: Pools, world: int, zero: int) -> None:
    """A forward run inside keeps its gradient back even if its backward comes later."""
    ranks(world).run(leave_no_sync_before_backward, zero)


def leave_no_sync_before_backward(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("odd_shapes", zero)
    first, second = batches_of(example, 2)
    with fxzero.no_sync(model):
        loss = example.loss(model, rows_of_rank(first))
    loss.backward()
    example.loss(model, rows_of_rank(second)).backward()
    for batch in (first, second):
        example.loss(reference, batch).backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@pytest.mark.parametrize("zero", [2, 3])
def test_no_sync_warns_where_it_has_no_effect(ranks: Pools, world: int, zero: int) -> None:
    """Stages 2 and 3 reduce every micro-batch: right gradients, and a warning that says so."""
    ranks(world).run(ask_for_no_sync_in_vain, zero)


def ask_for_no_sync_in_vain(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("odd_shapes", zero)

    def no_sync() -> AbstractContextManager[None]:
        return fxzero.no_sync(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxzero.FxZeroWarning)
        compare_accumulation(example, model, reference, [no_sync, no_sync, nullcontext], 0)
    ours = [w for w in caught if issubclass(w.category, fxzero.FxZeroWarning)]
    assert ours, "no FxZeroWarning"
    assert "no_sync" in str(ours[0].message), ours[0].message


@on_two_ranks
@pytest.mark.parametrize("zero", [0, *exhaustive(1)])
def test_both_forwards_before_their_backwards(ranks: Pools, world: int, zero: int) -> None:
    """The second forward reduces what the first one's backward is still to keep."""
    ranks(world).run(keep_after_both_forwards, zero)


def keep_after_both_forwards(zero: int) -> None:
    """Job."""
    example, model, reference = with_reference("odd_shapes", zero)
    first, second = batches_of(example, 2)
    for batch in (first, second):
        example.loss(reference, batch).backward()
    with fxzero.no_sync(model):
        kept = example.loss(model, rows_of_rank(first))
    reduced = example.loss(model, rows_of_rank(second))
    kept.backward()
    reduced.backward()
    assert_same(full_gradients(model), full_gradients(reference), TIGHT)


@on_two_ranks
@pytest.mark.parametrize("zero", [0, 1])
def test_what_comes_too_late_is_said(ranks: Pools, world: int, zero: int) -> None:
    """A kept gradient that no reduction has taken along."""
    ranks(world).run(keep_after_the_reduction, zero)


def keep_after_the_reduction(zero: int) -> None:
    """Job."""
    example, model, _ = with_reference("mlp", zero)
    first, second = batches_of(example, 2)
    with fxzero.no_sync(model):
        kept = example.loss(model, rows_of_rank(first))
    example.loss(model, rows_of_rank(second)).backward()
    with pytest.warns(fxzero.FxZeroWarning, match="came after the synchronised backward"):
        kept.backward()


class Sometimes(nn.Module):
    """With a head that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.head = nn.Linear(3, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        """(B, 3) to a scalar."""
        hidden = torch.tanh(self.always(x))
        return (hidden + self.head(hidden) if use else hidden).square().mean()


@on_two_ranks
@pytest.mark.parametrize(("zero", "users"), [(0, (0, 1)), (1, (0, 1)), (0, (1,))])
def test_what_only_an_earlier_micro_batch_uses(
    ranks: Pools, world: int, zero: int, users: tuple[int, ...]
) -> None:
    """Is reduced when it is asked for; at stage 0 also where one rank alone has used it."""
    ranks(world).run(use_once, zero, users)


def use_once(zero: int, users: tuple[int, ...]) -> None:
    """Job: twice, as what was kept is then forgotten."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = Sometimes().to(FLOAT64), Sometimes().to(FLOAT64)
    fxzero.shard(model, zero=zero)
    x = torch.randn(4, world, 2, 3, dtype=FLOAT64, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        for part in range(2):
            with fxzero.no_sync(model) if part == 0 else nullcontext():
                model(x[2 * step + part, rank], part == 0 and rank in users).backward()
            for each in range(world):
                loss = reference(x[2 * step + part, each], part == 0 and each in users)
                (loss / world).backward()
        reduce_leftovers(model)
        assert_same(full_gradients(model), full_gradients(reference), TIGHT)
        state = model_state(model)
        assert state is not None
        assert (state.kept, state.synchronised) == ({}, False)
