"""Which schedule `auto` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero.inspect.capture import fake_ranks
from fxzero.pipeline.replay import replay_table, unit_us, weights_last
from fxzero.pipeline.schedules import fastest, places_of_stages, table_of
from fxzero.pipeline.tables import TABLES, Action, Table, Work
from tests.inspect.test_pipeline import t5


def without_halves(action: Action) -> float:
    """A stage whose weights take nothing, or are frozen."""
    return 0.0 if action.work is Work.WEIGHT_GRADIENTS else 1.0


@pytest.mark.parametrize(
    ("layout", "name"), [("1f1b", "zb_h1"), ("interleaved", "interleaved"), ("zbv", "zbv")]
)
def test_the_fastest_of_those_with_the_same_stages(layout: str, name: str) -> None:
    table = fastest(places_of_stages(layout, 4), 8, unit_us)
    assert (table.name, table.num_micro_steps) == (name, 8)


def test_of_equally_fast_ones_it_holds_the_least() -> None:
    """Without gradients of weights, splitting gains nothing; gpipe would keep all micro-steps."""
    table = fastest(places_of_stages("gpipe", 4), 8, without_halves)
    assert table.name == "1f1b"


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_other_is_faster(num_ranks: int, micro_batches: int) -> None:
    places = places_of_stages("auto", num_ranks)
    early_us = weights_last(unit_us)
    chosen = fastest(places, micro_batches, unit_us)
    found = replay_table(chosen, unit_us, early_us=early_us).makespan_us
    for name in TABLES:
        if places_of_stages(name, num_ranks) == places:
            table = table_of(name, num_ranks, micro_batches)
            assert found <= replay_table(table, unit_us, early_us=early_us).makespan_us


@pytest.mark.exhaustive
def test_the_stages_of_a_t5_that_run_are_even() -> None:
    """Where operators run follows from the parameters' stages, and from what least crosses. The
    slowest takes at most a tenth more than the mean."""
    model, batch = t5()
    seen: list[float] = []

    def look(places: Sequence[int], micro_batches: int, action_us: Any) -> Table:
        works = (Work.FORWARD, Work.BACKWARD)
        seen.extend(sum(action_us(Action(s, work, 0)) for work in works) for s in range(4))
        return table_of("1f1b", 4, micro_batches)

    torch._dynamo.reset()
    with fake_ranks(4), mock.patch("fxzero.passes.split_stages.fastest", look):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pipeline",))
        fxzero.shard(model, 0, mesh=mesh, schedule="auto", example_inputs=batch)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = fxzero.compile_step(
            model, optimizer, micro_batches=2, options={"lower_regions": {"backend": "eager"}}
        )
        step(**{name: tensor.repeat(2, 1) for name, tensor in batch.items()})
    assert max(seen) <= 1.10 * sum(seen) / 4
